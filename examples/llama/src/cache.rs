//! Values of `--cache`, `--kv-dtype` and `--slack`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use burn_paged_attention::pages::CacheError;
use burn_paged_attention::pool::{CachePolicy, KvDtype, KvPoolConfig};
use clap::{Args, ValueEnum};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Store {
    /// The dtype of the model
    Model,
    Int8,
    Fp8,
}

impl From<Store> for KvDtype {
    fn from(store: Store) -> Self {
        match store {
            Store::Model => Self::Model,
            Store::Int8 => Self::Int8,
            Store::Fp8 => Self::Fp8E4m3,
        }
    }
}

/// Caches that are measured.
#[derive(Args, Debug)]
pub struct CacheArgs {
    /// Keys that a cache retains after a prompt: all, reachable (those that later tokens attend to), window:W,S (the last W and the first S), or by attention,
    /// per layer and KV head, h2o:H,R, h2o-mean:H,R, tova:C, snapkv:C, key-norm:C or combined:S,R,H; repeat to compare
    #[arg(long, value_name = "POLICY")]
    cache: Vec<Policy>,
    /// Dtype of stored keys and values; repeat to compare
    #[arg(long, value_enum)]
    kv_dtype: Vec<Store>,
    /// Evict when the cache has this many keys more than its policy retains [default: 256]
    #[arg(long)]
    slack: Option<usize>,
}

/// Policy, with its text as typed.
#[derive(Clone, Debug)]
struct Policy {
    text: String,
    policy: CachePolicy,
}

impl FromStr for Policy {
    type Err = CacheError;

    fn from_str(text: &str) -> Result<Self, CacheError> {
        let (text, policy) = (text.to_owned(), text.parse()?);
        Ok(Self { text, policy })
    }
}

/// Cache to measure.
#[derive(Clone, Debug)]
pub struct Cache {
    kept: Policy,
    store: Store,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.kept.text)?;
        match self.store {
            Store::Model => Ok(()),
            Store::Int8 => f.write_str(", int8"),
            Store::Fp8 => f.write_str(", fp8"),
        }
    }
}

impl CacheArgs {
    /// Returns every policy with every dtype; none if no flag asks for a cache.
    pub fn caches(&self) -> Result<Vec<Cache>> {
        if self.cache.is_empty() && self.kv_dtype.is_empty() {
            ensure!(self.slack.is_none(), "--slack needs a --cache that evicts");
            return Ok(Vec::new());
        }
        let mut policies = match self.cache.is_empty() {
            true => vec!["all".parse()?],
            false => self.cache.clone(),
        };
        let mut evicts = false;
        for Policy { text, policy } in &mut policies {
            let (CachePolicy::Evict(config), Some(slack)) = (policy, self.slack) else {
                continue;
            };
            config.slack = slack;
            config
                .validate()
                .with_context(|| format!("--cache {text} --slack {slack}"))?;
            evicts = true;
        }
        ensure!(
            evicts || self.slack.is_none(),
            "--slack needs a --cache that evicts"
        );
        let stores = match self.kv_dtype.as_slice() {
            [] => &[Store::Model],
            stores => stores,
        };
        let each = policies.into_iter().flat_map(|kept| {
            let of = move |&store| Cache {
                kept: kept.clone(),
                store,
            };
            stores.iter().map(of)
        });
        Ok(each.collect())
    }
}

impl Cache {
    /// Configures a pool with this cache, for calls of at most `longest` tokens.
    pub fn of(&self, config: KvPoolConfig, longest: usize) -> KvPoolConfig {
        let config = config.with_policy(self.kept.policy, longest);
        config.with_dtype(KvDtype::from(self.store))
    }
}
