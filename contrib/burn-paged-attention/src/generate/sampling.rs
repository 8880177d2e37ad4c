//! Sampling of the next token with a seed.

use std::ops::Deref;

use burn_blocksparse::internal::philox;

use crate::sampling::SampleOptions;

/// Last word of the generator's counter, which dropout does not use.
const STREAM: u32 = u32::MAX - 1;

/// Sampling of the next token: [`SampleOptions`] select candidates, a seed draws one of them. [`Default`] samples from the plain softmax.
///
/// ```
/// use burn_paged_attention::generate::Sampling;
///
/// let sampling = Sampling::default().temperature(0.8).top_k(Some(4)).top_p(0.9);
/// let kept = sampling.candidates(&[2.0, 1.5, 1.0, 0.2, -0.5, -1.0], |_| false);
/// let ids: Vec<u32> = kept.iter().map(|kept| kept.0).collect();
/// assert_eq!(ids, [0, 1, 2]);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct Sampling {
    /// Selection of candidates. The repetition penalty applies to tokens of the prompt and of the text.
    pub options: SampleOptions,
    /// Equal seeds, prompt indices and steps draw equal numbers, whatever else is in the batch. Default: 1.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        let options = SampleOptions::default();
        Self { options, seed: 1 }
    }
}

impl Deref for Sampling {
    type Target = SampleOptions;

    fn deref(&self) -> &SampleOptions {
        &self.options
    }
}

impl Sampling {
    blocksparse::setters! {
        /// Sets the divisor of the logits.
        temperature => options.temperature: f64,
        /// Sets the number of likeliest tokens that are kept.
        top_k => options.top_k: Option<usize>,
        /// Sets the total probability of the candidates.
        top_p => options.top_p: f64,
        /// Sets the least probability of a token, relative to the likeliest.
        min_p => options.min_p: f64,
        /// Sets the penalty of seen tokens.
        repetition => options.repetition: f64,
        /// Sets the seed.
        seed: u64,
    }

    /// Returns the token of a step of a prompt; None if no logit is finite.
    pub fn choose(
        &self,
        logits: &[f32],
        seen: impl Fn(u32) -> bool,
        [prompt, step]: [usize; 2],
    ) -> Option<u32> {
        let number = self.number(prompt, step);
        self.options.choose(logits, seen, number)
    }

    /// Returns the number in [0, 1), with 53 bits, that samples the token of a step of a prompt.
    pub fn number(&self, prompt: usize, step: usize) -> f64 {
        let counter = [
            step as u32,
            prompt as u32,
            (step as u64 >> 32) as u32,
            STREAM,
        ];
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let [high, low, ..] = philox(counter, key);
        let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
        bits as f64 * 2f64.powi(-53)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const LOGITS: [f32; 6] = [2.0, 1.5, 1.0, 0.2, -0.5, -1.0];

    fn probabilities(sampling: &Sampling) -> Vec<f64> {
        let kept = sampling.candidates(&LOGITS, |_| false);
        let ids: Vec<u32> = kept.iter().map(|kept| kept.0).collect();
        assert!(ids.iter().copied().eq(0..ids.len() as u32));
        assert!((kept.iter().map(|kept| kept.1).sum::<f64>() - 1.0).abs() < 1e-12);
        kept.into_iter().map(|kept| kept.1).collect()
    }

    /// Computed by hand in f64, to four digits.
    #[rstest]
    #[case(Sampling::default().temperature(0.8), &[0.5013, 0.2684, 0.1436, 0.0528, 0.0220, 0.0118])]
    #[case(Sampling::default().temperature(0.8).top_k(Some(4)), &[0.5189, 0.2777, 0.1487, 0.0547])]
    #[case(Sampling::default().temperature(0.8).top_k(Some(4)).top_p(0.9), &[0.5489, 0.2938, 0.1573])]
    #[case(Sampling::default().temperature(0.8).top_k(Some(4)).top_p(0.9).min_p(0.1), &[0.5489, 0.2938, 0.1573])]
    #[case(Sampling::default().temperature(0.8).top_k(Some(4)).top_p(0.9).min_p(0.3), &[0.6514, 0.3486])]
    #[case(Sampling::default().temperature(0.0), &[1.0])]
    fn distributions(#[case] sampling: Sampling, #[case] expected: &[f64]) {
        let got = probabilities(&sampling);
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 5e-5, "{got} {expected}");
        }
    }

    #[test]
    fn draws_are_the_first_whose_sum_exceeds_u() {
        let sampling = Sampling::default()
            .temperature(0.8)
            .top_k(Some(4))
            .top_p(0.9);
        let draw = |logits: &[f32], u| sampling.options.choose(logits, |_| false, u);
        for (u, expected) in [(0.0, 0), (0.3, 0), (0.5, 0), (0.75, 1), (0.95, 2), (1.0, 2)] {
            assert_eq!(draw(&LOGITS, u), Some(expected), "{u}");
        }
        assert_eq!(draw(&[], 0.5), None);
    }

    #[test]
    fn what_was_seen_is_less_likely() {
        let greedy = Sampling::default().temperature(0.0).repetition(1.2);
        // 2 / 1.2 = 1.667 stays above 1.5; a third of it does not.
        assert_eq!(greedy.choose(&LOGITS, |token| token == 0, [0, 0]), Some(0));
        let more = greedy.clone().repetition(3.0);
        assert_eq!(more.choose(&LOGITS, |token| token == 0, [0, 0]), Some(1));
        let ratio = |sampling: &Sampling, a: usize, b: usize| {
            let kept = sampling.candidates(&LOGITS, |token| token == 0 || token == 4);
            let of = |id: usize| kept.iter().find(|kept| kept.0 as usize == id).unwrap().1;
            (of(a) / of(b)).ln()
        };
        let sampling = Sampling::default().repetition(1.2);
        assert!((ratio(&sampling, 0, 1) - (2.0 / 1.2 - 1.5)).abs() < 1e-7);
        assert!((ratio(&sampling, 4, 5) - (-0.6 + 1.0)).abs() < 1e-7);
    }

    #[test]
    fn logits_that_are_no_numbers_count_as_none() {
        let sampling = Sampling::default();
        let nan = [f32::NAN, 0.0, f32::NEG_INFINITY];
        assert_eq!(sampling.candidates(&nan, |_| false), [(1, 1.0)]);
        assert_eq!(sampling.choose(&[f32::NAN; 3], |_| false, [0, 0]), None);
        let infinite = [0.0, f32::INFINITY, f32::INFINITY];
        assert_eq!(sampling.choose(&infinite, |_| false, [0, 0]), Some(1));
    }

    /// 10⁵ draws are within four standard deviations, and depend only on seed, prompt and step.
    #[test]
    fn draws_follow_the_probabilities() {
        let sampling = Sampling::default().temperature(0.8).seed(3);
        let expected = probabilities(&sampling);
        let mut counts = [0usize; 6];
        let draws = 100_000;
        for step in 0..draws {
            counts[sampling.choose(&LOGITS, |_| false, [5, step]).unwrap() as usize] += 1;
        }
        for (count, p) in counts.into_iter().zip(expected) {
            let deviation = (p * (1.0 - p) * draws as f64).sqrt();
            assert!((count as f64 - p * draws as f64).abs() < 4.0 * deviation);
        }
        let draws = |seed, prompt| -> Vec<u64> {
            (0..50)
                .map(|step| {
                    Sampling::default()
                        .seed(seed)
                        .number(prompt, step)
                        .to_bits()
                })
                .collect()
        };
        assert_eq!(draws(1, 0), draws(1, 0));
        assert_ne!(draws(1, 0), draws(1, 1));
        assert_ne!(draws(1, 0), draws(2, 0));
        assert_ne!(draws(1, 0), draws(1 + (1 << 40), 0));
    }

    #[rstest]
    #[case(Sampling::default().temperature(-0.5), "temperature must be a number, at least 0, got -0.5")]
    #[case(Sampling::default().temperature(f64::NAN), "temperature must be a number, at least 0, got NaN")]
    #[case(Sampling::default().top_k(Some(0)), "top_k must be at least 1, got 0")]
    #[case(Sampling::default().top_p(0.0), "top_p must be above 0 and at most 1, got 0")]
    #[case(Sampling::default().top_p(1.5), "top_p must be above 0 and at most 1, got 1.5")]
    #[case(Sampling::default().min_p(-0.1), "min_p must be from 0 to 1, got -0.1")]
    #[case(Sampling::default().repetition(0.0), "repetition must be a number above 0, got 0")]
    fn numbers_out_of_range(#[case] sampling: Sampling, #[case] message: &str) {
        assert_eq!(sampling.check().unwrap_err().to_string(), message);
    }
}
