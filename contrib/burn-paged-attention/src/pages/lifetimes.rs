//! Last queries of keys, by table row.

use std::collections::BTreeSet;

use super::config::PoolConfig;
use super::{ALWAYS, KvRetention, NEVER};
use blocksparse::{LastUse, Pattern};

/// Last query of each key, over the heads that share a table row.
#[derive(Clone, Debug)]
pub(super) struct Lifetimes {
    pattern: Pattern,
    /// One head of each kind, per table row.
    heads: Vec<Vec<usize>>,
    /// Number of query heads of a table row.
    heads_of_row: usize,
    /// True if no key is ever evicted.
    keeps_all: bool,
    /// True if in all heads a query sees exactly the live keys up to itself, and the heads of a table row are alike.
    row_is_live: bool,
}

impl Lifetimes {
    pub(super) fn new(config: &PoolConfig) -> Self {
        let (heads, kv_heads) = (config.heads, config.kv_heads);
        let kinds = |rows: usize| -> Vec<BTreeSet<usize>> {
            let group = heads / rows;
            let kind = |head: usize| match config.pattern.head_period() {
                Some(period) => head.checked_rem(period).unwrap_or(0),
                None => head,
            };
            let row = |row: usize| (row * group..(row + 1) * group).map(kind).collect();
            (0..rows).map(row).collect()
        };
        let keeps_all = config.pattern.keeps_all();
        let kinds = match config.table_rows {
            Some(rows) => kinds(rows),
            None => {
                let each = kinds(kv_heads);
                match keeps_all || each.iter().all(|kind| kind == &each[0]) {
                    true => kinds(1),
                    false => each,
                }
            }
        };
        let heads_of_row = heads / kinds.len();
        let alike = kinds.iter().all(|kinds| kinds.len() == 1);
        Self {
            row_is_live: alike && (0..heads).all(|head| config.pattern.row_is_live(head)),
            pattern: config.pattern.clone(),
            heads: kinds.into_iter().map(Vec::from_iter).collect(),
            heads_of_row,
            keeps_all,
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.heads.len()
    }

    pub(super) fn heads_of_row(&self) -> usize {
        self.heads_of_row
    }

    /// Returns whether every head sees all keys up to the query's own.
    pub(super) fn is_causal(&self) -> bool {
        self.keeps_all && self.row_is_live && self.pattern.is_causal()
    }

    pub(super) fn row_is_live(&self) -> bool {
        self.row_is_live
    }

    /// Returns whether each key is evicted as soon as it dies, without waiting for earlier keys.
    pub(super) fn dies_in_order(&self, residency: KvRetention) -> bool {
        match residency {
            KvRetention::Window { .. } => self.keeps_all,
            KvRetention::All | KvRetention::Reachable | KvRetention::Evict => {
                self.pattern.dies_in_order()
            }
        }
    }

    /// Returns the last query of any head of a table row that sees a key, in a sequence with this retention: [`NEVER`], a position, or [`ALWAYS`].
    pub(super) fn last(&self, residency: KvRetention, row: usize, position: usize) -> i32 {
        let reached = match self.keeps_all {
            true => ALWAYS,
            false => {
                let position = position as i64;
                let heads = self.heads[row].iter();
                let last = heads.map(|&head| self.pattern.last_query(head, position));
                number(last.max().unwrap_or(LastUse::Never))
            }
        };
        match residency {
            KvRetention::Window { window, sinks } if position >= sinks => {
                let last = position.saturating_add(window - 1);
                reached.min(i32::try_from(last).unwrap_or(ALWAYS))
            }
            _ => reached,
        }
    }

    /// Returns the last query for which a key is retained.
    pub(super) fn kept_until(residency: KvRetention, last: i32) -> i32 {
        match residency {
            KvRetention::All | KvRetention::Evict => ALWAYS,
            KvRetention::Reachable | KvRetention::Window { .. } => last,
        }
    }

    /// Returns whether [`Self::kept_until`] of [`Self::last`] is [`ALWAYS`] for all keys.
    pub(super) fn is_everything_kept(&self, residency: KvRetention) -> bool {
        match residency {
            KvRetention::All | KvRetention::Evict => true,
            KvRetention::Reachable => self.keeps_all,
            KvRetention::Window { .. } => false,
        }
    }
}

/// Positions end before the number that means "always", so a larger last query is never reached.
fn number(last: LastUse) -> i32 {
    match last {
        LastUse::Never => NEVER,
        LastUse::At(last) => i32::try_from(last.max(-1)).unwrap_or(ALWAYS),
        LastUse::Always => ALWAYS,
    }
}
