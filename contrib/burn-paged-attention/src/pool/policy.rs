//! Text notation of cache policies.

use std::str::FromStr;

use super::{CacheError, EvictionConfig, EvictionScore, KvPoolConfig, KvRetention, ScoreSmoothing};

/// The largest number in [`CachePolicy::NOTATION`].
const MOST: usize = 1 << 30;

/// Retention of keys by position, or eviction by attention.
///
/// ```
/// use burn_paged_attention::pool::{CachePolicy, EvictionConfig, KvPoolConfig};
///
/// let policy: CachePolicy = "snapkv:2048".parse()?;
/// assert_eq!(policy, CachePolicy::Evict(EvictionConfig::snapkv(2048)));
/// // Prompts of up to 8,192 tokens.
/// let config = KvPoolConfig::new(1, 16_384).with_policy(policy, 8192);
/// # Ok::<(), burn_paged_attention::pool::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CachePolicy {
    /// By position.
    Retain(KvRetention),
    /// By attention. Changes the output.
    Evict(EvictionConfig),
}

impl Default for CachePolicy {
    fn default() -> Self {
        Self::Retain(KvRetention::default())
    }
}

impl CachePolicy {
    /// Accepted texts. H: keys with the highest scores, R: newest keys, S: first keys, C: keys in total, M: newest queries, F: adjacent keys that
    /// are pooled.
    pub const NOTATION: &str = "all, reachable, window:W,S with W at least 1, h2o:H,R, h2o-mean:H,R, tova:C, snapkv:C,M,F, key-norm:C or combined:S,R,H, \
                                with whole numbers up to 1073741824";
}

impl FromStr for CachePolicy {
    type Err = CacheError;

    fn from_str(text: &str) -> Result<Self, CacheError> {
        let Some(policy) = parse(text) else {
            return Err(CacheError::argument("cache", Self::NOTATION, text));
        };
        if let Self::Evict(config) = policy {
            config.validate()?;
        }
        Ok(policy)
    }
}

fn parse(text: &str) -> Option<CachePolicy> {
    let (name, numbers) = match text.split_once(':') {
        None => (text, Vec::new()),
        Some((name, numbers)) => {
            let numbers = numbers.split(',').map(|number| number.parse().ok());
            let numbers = numbers.map(|number| number.filter(|number| *number <= MOST));
            (name, numbers.collect::<Option<Vec<usize>>>()?)
        }
    };
    let snapkv = |capacity, window, pool| {
        EvictionConfig::snapkv_with(capacity, window, pool, ScoreSmoothing::Average)
    };
    let window = |window, sinks| CachePolicy::Retain(KvRetention::Window { window, sinks });
    Some(CachePolicy::Evict(match (name, numbers.as_slice()) {
        ("all", []) => return Some(CachePolicy::Retain(KvRetention::All)),
        ("reachable", []) => return Some(CachePolicy::Retain(KvRetention::Reachable)),
        ("window", &[width]) if width > 0 => return Some(window(width, 0)),
        ("window", &[width, sinks]) if width > 0 => return Some(window(width, sinks)),
        ("h2o", &[heavy, recent]) => EvictionConfig::h2o(heavy, recent),
        ("h2o-mean", &[heavy, recent]) => EvictionConfig::h2o_mean(heavy, recent),
        ("tova", &[capacity]) => EvictionConfig::tova(capacity),
        ("snapkv", &[capacity]) => EvictionConfig::snapkv(capacity),
        ("snapkv", &[capacity, window]) => snapkv(capacity, window, 5),
        ("snapkv", &[capacity, window, pool]) => snapkv(capacity, window, pool),
        ("key-norm", &[capacity]) => EvictionConfig::key_norm(capacity),
        ("combined", &[sinks, recent, heavy]) => {
            EvictionConfig::combined(EvictionScore::Sum, sinks, recent, heavy)
        }
        _ => return None,
    }))
}

impl KvPoolConfig {
    /// Applies `policy`. `longest` is the most tokens of a call, because all keys of a call are stored before any are evicted.
    pub fn with_policy(self, policy: CachePolicy, longest: usize) -> Self {
        match policy {
            CachePolicy::Retain(residency @ KvRetention::Window { .. }) => {
                self.with_residency(residency).with_chunk(longest)
            }
            CachePolicy::Retain(residency) => self.with_residency(residency),
            CachePolicy::Evict(eviction) => self.with_eviction(eviction).with_chunk(longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_policies_or_named() {
        let read = |text: &str| text.parse::<CachePolicy>();
        let window = KvRetention::Window {
            window: 8,
            sinks: 2,
        };
        assert_eq!(read("window:8,2"), Ok(CachePolicy::Retain(window)));
        let h2o = EvictionConfig::h2o(3, 4);
        assert_eq!(read("h2o:3,4"), Ok(CachePolicy::Evict(h2o)));
        assert_eq!(read("reachable"), Ok(CachePolicy::default()));
        for text in [
            "",
            "all:",
            "all:1",
            "window:0",
            "h2o:3",
            "h2o:3,x",
            "tova:1073741825",
        ] {
            let message = read(text).unwrap_err().to_string();
            let expected = format!("cache must be {}, got {text}", CachePolicy::NOTATION);
            assert_eq!(message, expected);
        }
        assert!(read("tova:0").unwrap_err().to_string().contains("capacity"));
    }
}
