//! Drafts of the next tokens, which a model verifies several at a time.

use std::collections::HashMap;

use burn_sparse_transformer::TransformerError;

/// Number of earlier matches, latest first, that the search for the longest one examines.
const MOST_PLACES: usize = 64;

/// Speculative decoding by prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): finds an earlier occurrence of the last few tokens, and drafts
/// the tokens that followed it. No second model is needed. Repetitive text gains most: code, tables, dialogues.
///
/// The model reads the drafted tokens in one call after the last one. A draft token is accepted if sampling draws the same token; the first rejected
/// one and those after it are rolled back. So the text is that without drafts at any temperature, as far as calls of several tokens and of one give
/// the same logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct PromptLookup {
    /// Most tokens of a draft.
    pub tokens: usize,
    /// Fewest tokens that must match. Default: 3.
    pub shortest: usize,
    /// Most tokens that are compared. The draft comes from the longest match, the latest in a tie. Default: 16.
    pub longest: usize,
}

impl PromptLookup {
    /// Makes drafts of up to `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        Self {
            tokens,
            shortest: 3,
            longest: 16,
        }
    }

    /// Sets the fewest and the most tokens that are compared.
    pub fn with_match(mut self, shortest: usize, longest: usize) -> Self {
        self.shortest = shortest;
        self.longest = longest;
        self
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`TransformerError::Argument`] naming the first value out of range.
    pub fn check(&self) -> Result<(), TransformerError> {
        blocksparse::ensure! {
            TransformerError;
            self.tokens > 0 => "drafts.tokens", "at least 1", self.tokens;
            self.shortest > 0 => "drafts.shortest", "at least 1", self.shortest;
            self.longest >= self.shortest => "drafts.longest", format!("at least {}, the fewest", self.shortest), self.longest;
        }
        Ok(())
    }
}

/// A text with an index of its n-grams.
///
/// ```
/// use burn_paged_attention::generate::{PromptLookup, PromptLookupIndex};
///
/// let mut text = PromptLookupIndex::new(PromptLookup::new(4).with_match(2, 8));
/// text.extend([5, 6, 7, 8, 9, 1, 6, 7]);
/// // 6 7 was there before.
/// assert_eq!(text.draft(), [8, 9, 1, 6]);
/// ```
#[derive(Clone, Debug)]
pub struct PromptLookupIndex {
    drafts: PromptLookup,
    tokens: Vec<u32>,
    /// Ends of the occurrences of each n-gram of [`PromptLookup::shortest`] tokens.
    places: HashMap<Box<[u32]>, Vec<usize>>,
}

impl PromptLookupIndex {
    /// Makes the index of an empty text.
    pub fn new(drafts: PromptLookup) -> Self {
        Self {
            drafts,
            tokens: Vec::new(),
            places: HashMap::new(),
        }
    }

    /// Adds tokens to the text.
    pub fn extend(&mut self, tokens: impl IntoIterator<Item = u32>) {
        for token in tokens {
            self.tokens.push(token);
            let end = self.tokens.len();
            if let Some(begin) = end.checked_sub(self.drafts.shortest) {
                let ngram = self.tokens[begin..end].into();
                self.places.entry(ngram).or_default().push(end);
            }
        }
    }

    /// Drafts [`PromptLookup::tokens`] next tokens. Empty if the last few tokens have no earlier occurrence. If the match is closer to the end than
    /// the draft is long, the draft continues with its own tokens, like an overlapping copy.
    pub fn draft(&self) -> Vec<u32> {
        let end = self.tokens.len();
        let Some(begin) = end.checked_sub(self.drafts.shortest) else {
            return Vec::new();
        };
        let places = self.places.get(&self.tokens[begin..end]);
        let earlier = places.into_iter().flatten().rev().skip(1).take(MOST_PLACES);
        let alike = |place: usize| {
            let back = 1..=self.drafts.longest.min(place);
            let is_alike = |&back: &usize| self.tokens[place - back] == self.tokens[end - back];
            back.take_while(is_alike).count()
        };
        // In a tie the latest wins: an earlier match must be longer.
        let best = earlier.fold(None, |best: Option<(usize, usize)>, &place| {
            let length = alike(place);
            match best {
                Some((_, longest)) if longest >= length => best,
                _ => Some((place, length)),
            }
        });
        let Some((place, _)) = best else {
            return Vec::new();
        };
        let following = self.tokens[place..].iter().copied().cycle();
        following.take(self.drafts.tokens).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    // Too short, and without a match.
    #[case(&[1], &[])]
    #[case(&[1, 2, 3], &[])]
    // The later of two equally long matches.
    #[case(&[1, 2, 3, 1, 2, 4, 1, 2], &[4, 1, 2])]
    // An earlier, longer match.
    #[case(&[9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], &[3, 5, 1])]
    // Periodic texts: the draft continues the period.
    #[case(&[7, 7, 7], &[7, 7, 7])]
    #[case(&[4, 1, 2, 1, 2, 1], &[2, 1, 2])]
    fn drafts_follow_the_longest_match(#[case] text: &[u32], #[case] expected: &[u32]) {
        let mut index = PromptLookupIndex::new(PromptLookup::new(3).with_match(2, 4));
        index.extend(text.iter().copied());
        assert_eq!(index.draft(), expected);
    }

    #[rstest]
    #[case(PromptLookup::new(0), "drafts.tokens must be at least 1, got 0")]
    #[case(PromptLookup::new(4).with_match(0, 3), "drafts.shortest must be at least 1, got 0")]
    #[case(PromptLookup::new(4).with_match(5, 3), "drafts.longest must be at least 5, the fewest, got 3")]
    fn numbers_out_of_range(#[case] drafts: PromptLookup, #[case] message: &str) {
        assert_eq!(drafts.check().unwrap_err().to_string(), message);
    }
}
