//! Random calls on a page pool, against plain lists of tokens, with pages that are really written and copied.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use blocksparse::{LastUse, Pattern};
use burn_paged_attention::pages::{
    ALWAYS, CacheError, KvRetention, PagePool, PoolConfig, SequenceId, SlotKey, Step, Writes,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::rows::is_near;

/// A call; sequences are indices into the present ones.
#[derive(Clone, Debug)]
enum Call {
    Join(KvRetention),
    /// With a prefix of an earlier sequence's tokens, of this length, and some others.
    JoinWithPrefix(KvRetention, usize, usize),
    Remember(usize, usize),
    /// Save a sequence, and load it as a new one.
    SaveAndLoad(usize),
    Leave(usize),
    Fork(usize),
    Append(usize, usize),
    Prefill(usize, usize),
    AppendEach(usize),
    Truncate(usize, usize),
    Rollback(usize, usize),
}

fn residency() -> impl Strategy<Value = KvRetention> {
    prop_oneof![
        1 => Just(KvRetention::All),
        3 => Just(KvRetention::Reachable),
        1 => (1usize..12, 0usize..6).prop_map(|(window, sinks)| KvRetention::Window { window, sinks }),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        2 => residency().prop_map(Call::Join),
        2 => (residency(), 0usize..30, 0usize..40).prop_map(|(residency, at, n)| Call::JoinWithPrefix(residency, at, n)),
        3 => (0usize..8, 0usize..3).prop_map(|(at, less)| Call::Remember(at, less)),
        1 => (0usize..8).prop_map(Call::SaveAndLoad),
        2 => (0usize..8).prop_map(Call::Leave),
        2 => (0usize..8).prop_map(Call::Fork),
        6 => (0usize..8, 0usize..7).prop_map(|(at, n)| Call::Append(at, n)),
        1 => (0usize..8, 0usize..20).prop_map(|(at, n)| Call::Prefill(at, n)),
        3 => (0usize..4).prop_map(Call::AppendEach),
        2 => (0usize..8, 0usize..60).prop_map(|(at, len)| Call::Truncate(at, len)),
        3 => (0usize..8, 0usize..5).prop_map(|(at, n)| Call::Rollback(at, n)),
    ]
}

fn patterns() -> Vec<Pattern> {
    vec![
        Pattern::causal(),
        Pattern::local(5),
        Pattern::strided(4),
        Pattern::fixed(6, 2),
        Pattern::fixed_heads(6, 1, 3),
        Pattern::streaming(4, 3),
        Pattern::merged_strided(4),
        Pattern::vertical_slash([0, 3, 9], [0, 1, 4]),
        Pattern::vertical_slash([5], []),
        Pattern::chunked_window(4, 1, 0).and_causal(),
        Pattern::chunked_window(4, 1, 0),
        Pattern::prefix_lm(5),
        Pattern::intersection([Pattern::documents([0, 5, 9, 30]), Pattern::local(8)]),
        Pattern::packed([0, 7, 20], Pattern::fixed(4, 1)),
        Pattern::deepspeed_fixed(6, 2, 3, false).and_causal(),
        Pattern::longformer(3, 1, [0, 6]).and_causal(),
        Pattern::bigbird(4, 9, 1, 3).and_causal(),
        Pattern::per_head([Pattern::local(3), Pattern::strided(3), Pattern::fixed(4, 1)]),
        Pattern::global_keys([1, 2]).and_causal(),
    ]
}

/// Tokens and retention of a sequence.
struct Model {
    tokens: Vec<u32>,
    residency: KvRetention,
    /// Least length that it must be possible to roll back to.
    oldest: usize,
    /// The sequence's table on the device, to which only changes were sent.
    table: Vec<Vec<i32>>,
}

/// Returns the contents of each key, a hash of all tokens up to its own.
fn contents(tokens: &[u32]) -> Vec<u64> {
    let mut hasher = DefaultHasher::new();
    let mut content = |token: &u32| {
        token.hash(&mut hasher);
        hasher.finish()
    };
    tokens.iter().map(&mut content).collect()
}

struct Machine {
    pool: PagePool,
    pattern: Pattern,
    heads: usize,
    models: BTreeMap<SequenceId, Model>,
    /// Contents of the slots: table row, and hash of all tokens up to the key's.
    memory: Vec<Option<(usize, u64)>>,
    next_token: u32,
    /// Tokens of earlier sequences.
    prompts: Vec<Vec<u32>>,
    is_knowing: bool,
    rollback: usize,
    /// Number of tokens of known prefixes that were found.
    found: usize,
}

impl Machine {
    fn new(
        config: PoolConfig,
        pattern: Pattern,
        heads: usize,
        rollback: usize,
        is_knowing: bool,
    ) -> Self {
        Self {
            memory: vec![None; config.pages() * config.page_size()],
            pool: PagePool::new(config).unwrap(),
            pattern,
            heads,
            models: BTreeMap::new(),
            next_token: 0,
            prompts: Vec::new(),
            is_knowing,
            rollback,
            found: 0,
        }
    }

    fn id(&self, at: usize) -> Option<SequenceId> {
        let count = self.models.len().max(1);
        self.models.keys().nth(at % count).copied()
    }

    /// Applies the pool's writes to the pages.
    fn write(&mut self, steps: Vec<(SequenceId, Writes)>) {
        let page_size = self.pool.config().page_size();
        let freed = steps.iter().flat_map(|(_, writes)| &writes.freed);
        for &page in freed {
            self.memory[page * page_size..(page + 1) * page_size].fill(None);
        }
        for (_, writes) in &steps {
            for copy in &writes.copies {
                for slot in copy.slots.clone() {
                    let copied = self.memory[copy.from * page_size + slot];
                    self.memory[copy.to * page_size + slot] = copied;
                }
            }
        }
        for (id, writes) in steps {
            let model = self.models.get_mut(&id).unwrap();
            assert_eq!(writes.first, model.tokens.len());
            let new = self.next_token..self.next_token + writes.tokens as u32;
            model.tokens.extend(new);
            self.next_token += writes.tokens as u32;
            let contents = contents(&model.tokens);
            for row in 0..writes.rows {
                for token in 0..writes.tokens {
                    if let Some(slot) = writes.slot(row, token) {
                        assert_eq!(self.pool.references(slot.page), 1);
                        let content = (row, contents[writes.first + token]);
                        self.memory[slot.page * page_size + slot.slot] = Some(content);
                    }
                }
            }
            for change in &writes.changes {
                let row = &mut model.table[change.row];
                row.resize(row.len().max(writes.entries), -1);
                row[change.entry] = change.page as i32;
            }
        }
    }

    fn step(&mut self, steps: &[(SequenceId, Step)]) {
        let before = self.pool.clone();
        let asked: Vec<Step> = steps.iter().map(|&(_, step)| step).collect();
        match self.pool.steps(&asked) {
            Ok(writes) => {
                for (&(id, step), writes) in steps.iter().zip(&writes) {
                    let model = self.models.get_mut(&id).unwrap();
                    let query = match step == Step::prefill(id, writes.tokens) {
                        true => writes.first + writes.tokens,
                        false => writes.first,
                    };
                    if writes.tokens > 0 && model.residency != KvRetention::All {
                        model.oldest = model.oldest.max(query.saturating_sub(self.rollback));
                    }
                }
                self.write(steps.iter().map(|&(id, _)| id).zip(writes).collect());
            }
            Err(error) => {
                let expected = matches!(
                    error,
                    CacheError::OutOfPages { .. } | CacheError::Boundary { .. }
                );
                assert!(expected, "{error}");
                let ids: Vec<SequenceId> = self.models.keys().copied().collect();
                assert_eq!(self.pool.tables(&ids), before.tables(&ids));
                assert_eq!(self.pool.free_pages(), before.free_pages());
            }
        }
    }

    fn enter(&mut self, id: SequenceId, tokens: Vec<u32>, residency: KvRetention, oldest: usize) {
        let tables = self.pool.tables(&[id]).unwrap();
        let table = tables
            .table
            .chunks(tables.max_pages)
            .map(<[i32]>::to_vec)
            .collect();
        let model = Model {
            tokens,
            residency,
            oldest,
            table,
        };
        self.models.insert(id, model);
    }

    fn call(&mut self, call: &Call) {
        match *call {
            Call::Join(residency) => {
                let id = self.pool.join(residency).unwrap();
                self.enter(id, Vec::new(), residency, 0);
            }
            Call::JoinWithPrefix(residency, at, n) => {
                if !self.is_knowing || self.prompts.is_empty() || self.models.len() >= 8 {
                    return;
                }
                let mut prompt = self.prompts[at % self.prompts.len()].clone();
                prompt.truncate(n);
                prompt.extend([1 << 30, 1 << 30]);
                let expected = self.pool.known_prefix(residency, &prompt).unwrap();
                let (id, known) = self.pool.join_with_prefix(residency, &prompt, n).unwrap();
                assert!(known <= expected);
                self.found += known;
                prompt.truncate(known);
                self.enter(id, prompt, residency, 0);
            }
            Call::Remember(at, less) => {
                if let Some(id) = self.id(at).filter(|_| self.is_knowing) {
                    let tokens = &self.models[&id].tokens;
                    let told = &tokens[..tokens.len().saturating_sub(less)];
                    self.pool.remember(id, told).unwrap();
                    self.prompts.push(told.to_vec());
                }
            }
            Call::SaveAndLoad(at) => {
                if let Some(id) = self.id(at).filter(|_| self.models.len() < 8) {
                    self.save_and_load(id);
                }
            }
            Call::Leave(at) => {
                if let Some(id) = self.id(at) {
                    self.pool.leave(id).unwrap();
                    self.models.remove(&id);
                }
            }
            Call::Fork(at) => {
                if let Some(id) = self.id(at).filter(|_| self.models.len() < 8) {
                    let fork = self.pool.fork(id).unwrap();
                    let model = &self.models[&id];
                    self.enter(fork, model.tokens.clone(), model.residency, model.oldest);
                }
            }
            Call::Append(at, n) => {
                if let Some(id) = self.id(at) {
                    self.step(&[(id, Step::decode(id, n))]);
                }
            }
            Call::Prefill(at, n) => {
                if let Some(id) = self.id(at) {
                    self.step(&[(id, Step::prefill(id, n))]);
                }
            }
            Call::AppendEach(n) => {
                let ids = self.models.keys();
                let steps: Vec<_> = ids.map(|&id| (id, Step::decode(id, n))).collect();
                self.step(&steps);
            }
            Call::Truncate(at, len) => {
                if let Some(id) = self.id(at) {
                    let tokens = self.models[&id].tokens.len();
                    self.truncate(id, len % (tokens + 1));
                }
            }
            Call::Rollback(at, n) => {
                if let Some(id) = self.id(at) {
                    let tokens = self.models[&id].tokens.len();
                    self.truncate(id, tokens.saturating_sub(n));
                }
            }
        }
    }

    fn save_and_load(&mut self, id: SequenceId) {
        let page_size = self.pool.config().page_size();
        let saved = self.pool.save(id).unwrap();
        let text = serde_json::to_string(&saved).unwrap();
        let read = serde_json::from_str(&text).unwrap();
        assert_eq!(saved, read);
        let rows = 0..self.pool.table_rows();
        let keys = rows.map(|row| self.pool.slot_keys(id, row).unwrap());
        let content = |key: &SlotKey| self.memory[key.slot.page * page_size + key.slot.slot];
        let contents: Vec<Vec<_>> = keys
            .map(|keys| keys.iter().map(content).collect())
            .collect();
        let before = self.pool.free_pages();
        match self.pool.load(&read) {
            Ok((loaded, slots)) => {
                let expected = self.pool.saved_keys(&saved).unwrap();
                assert_eq!(slots.iter().map(Vec::len).collect::<Vec<_>>(), expected);
                for (slots, contents) in slots.into_iter().zip(contents) {
                    for (slot, content) in slots.into_iter().zip(contents) {
                        self.memory[slot as usize] = content;
                    }
                }
                let model = &self.models[&id];
                self.enter(loaded, model.tokens.clone(), model.residency, model.oldest);
            }
            Err(error) => {
                assert!(matches!(error, CacheError::OutOfPages { .. }), "{error}");
                assert_eq!(self.pool.free_pages(), before);
            }
        }
    }

    fn truncate(&mut self, id: SequenceId, len: usize) {
        let oldest = self.pool.oldest(id).unwrap();
        match self.pool.truncate(id, len) {
            Ok(()) => self.models.get_mut(&id).unwrap().tokens.truncate(len),
            Err(error) if len < oldest => {
                assert_eq!(error, CacheError::Gone { asked: len, oldest });
            }
            Err(error) => assert!(matches!(error, CacheError::Boundary { .. }), "{error}"),
        }
    }

    /// Returns the last query of a key by any head of a table row.
    fn last(&self, model: &Model, row: usize, position: usize) -> i32 {
        let of_row = self.heads / self.pool.table_rows();
        let heads = row * of_row..(row + 1) * of_row;
        let last = heads
            .map(|head| self.pattern.last_query(head, position as i64))
            .max();
        let last = match last.unwrap() {
            LastUse::Never => -1,
            LastUse::At(last) => last as i32,
            LastUse::Always => ALWAYS,
        };
        match model.residency {
            KvRetention::Window { window, sinks } if position >= sinks => {
                last.min((position + window - 1) as i32)
            }
            _ => last,
        }
    }

    /// Checks that every key that is needed is in its slot and has its contents.
    fn check(&self) {
        self.pool.verify().unwrap();
        let page_size = self.pool.config().page_size();
        let rows = self.pool.table_rows();
        let [positions, last] = self.pool.visibility();
        for (&id, model) in &self.models {
            let next = model.tokens.len();
            let contents = contents(&model.tokens);
            assert_eq!(self.pool.len(id).unwrap(), next);
            let tables = self.pool.tables(&[id]).unwrap();
            let oldest = self.pool.oldest(id).unwrap();
            assert!(oldest <= model.oldest, "{id} forgot what a rollback needs");
            let mut live_keys = 0;
            for row in 0..rows {
                let span = &tables.spans[row * 4..row * 4 + 4];
                let [permanent, entry, start, timed] = [0, 1, 2, 3].map(|at| span[at] as usize);
                let entries = &tables.table[row * tables.max_pages..(row + 1) * tables.max_pages];
                let first = entry * page_size + start;
                let page_list = (0..permanent).chain(first..first + timed);
                let used: BTreeSet<usize> = page_list.clone().map(|at| at / page_size).collect();
                for (at, &page) in entries.iter().enumerate() {
                    assert_eq!(page >= 0, used.contains(&at));
                    let is_right = page < 0 || model.table[row][at] == page;
                    assert!(is_right, "changes were not sent");
                }
                let keys = self.pool.slot_keys(id, row).unwrap();
                assert_eq!(keys.len(), permanent + timed);
                let mut found = BTreeSet::new();
                for (at, key) in page_list.zip(keys) {
                    let slot = entries[at / page_size] as usize * page_size + at % page_size;
                    assert_eq!(slot, key.slot.page * page_size + key.slot.slot);
                    assert_eq!(key.last, self.last(model, row, key.position));
                    let expected = Some((row, contents[key.position]));
                    assert_eq!(self.memory[slot], expected, "{id}, row {row}: {key:?}");
                    assert!(found.insert(key.position));
                    assert_eq!(
                        (positions[slot], last[slot]),
                        (key.position as i32, key.last)
                    );
                }
                for position in 0..next {
                    let last = self.last(model, row, position);
                    let is_kept = model.residency == KvRetention::All || last >= oldest as i32;
                    assert!(!is_kept || found.contains(&position));
                    live_keys += usize::from(last >= next as i32);
                }
            }
            for head in 0..self.heads {
                let row = self.pool.row_of_head(head);
                let entries = &tables.table[row * tables.max_pages..];
                for query in [oldest, next] {
                    let slots = self.pool.row_slots(id, head, query).unwrap();
                    let content = |at: usize| {
                        self.memory[entries[at / page_size] as usize * page_size + at % page_size]
                    };
                    let mut read: Vec<_> = slots.into_iter().map(content).collect();
                    let sees = |&j: &usize| {
                        is_near(model.residency, j, query)
                            && self.pattern.attends(head, query as i64, j as i64)
                    };
                    let seen = (0..next).filter(sees).map(|j| Some((row, contents[j])));
                    let mut seen: Vec<_> = seen.collect();
                    read.sort_unstable();
                    seen.sort_unstable();
                    assert_eq!(read, seen, "head {head}, query {query}");
                }
            }
            let usage = self.pool.usage(id).unwrap();
            assert_eq!(usage.live, live_keys);
            assert!(usage.live <= usage.stored && usage.stored <= usage.slots);
        }
    }
}

/// Generates calls that write and find known pages.
fn knowing_call() -> impl Strategy<Value = Call> {
    let residency = Just(KvRetention::Reachable);
    prop_oneof![
        3 => (residency, 0usize..30, 0usize..20).prop_map(|(residency, at, n)| Call::JoinWithPrefix(residency, at, n)),
        4 => (0usize..8, 0usize..2).prop_map(|(at, less)| Call::Remember(at, less)),
        1 => (0usize..8).prop_map(Call::Leave),
        1 => (0usize..8).prop_map(Call::Fork),
        6 => (0usize..8, 1usize..6).prop_map(|(at, n)| Call::Append(at, n)),
        4 => (0usize..8, 0usize..5).prop_map(|(at, n)| Call::Rollback(at, n)),
    ]
}

fn run(mut machine: Machine, pages: usize, calls: &[Call]) -> usize {
    machine.call(&Call::Join(KvRetention::Reachable));
    for call in calls {
        machine.call(call);
        machine.check();
    }
    let ids: Vec<SequenceId> = machine.pool.sequences().collect();
    for id in ids {
        machine.pool.leave(id).unwrap();
    }
    assert_eq!(machine.pool.free_pages(), pages);
    machine.pool.verify().unwrap();
    machine.found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any calls in any order leave the right contents, or fail without any change.
    #[test]
    fn calls_in_any_order(
        pattern in prop::sample::select(patterns()),
        heads in prop::sample::select(vec![[1, 1], [4, 2], [3, 3], [6, 2]]),
        page_size in prop::sample::select(vec![1, 2, 4, 8, 16]),
        pages in 4usize..60,
        rollback in 0usize..5,
        reuse in prop::sample::select(vec![None, Some(u64::MAX), Some(1)]),
        calls in prop::collection::vec(call(), 1..60),
    ) {
        let [heads, kv_heads] = heads;
        prop_assume!(pattern.validate(heads).is_ok());
        let config = PoolConfig::new(pages).with_small_pages().with_page_size(page_size);
        let config = config.with_pattern(pattern.clone(), heads, kv_heads).with_rollback(rollback);
        let config = match reuse {
            Some(mask) => config.with_prefix_reuse(3).with_hash_mask(mask),
            None => config,
        };
        run(Machine::new(config, pattern, heads, rollback, reuse.is_some()), pages, &calls);
    }
}

/// Sequences with common beginnings, whose pages are found, written and forgotten.
#[test]
fn prefixes_in_any_order() {
    let mut runner = TestRunner::deterministic();
    let mut found = 0;
    for case in 0..200 {
        let pattern = [Pattern::causal(), Pattern::strided(3), Pattern::local(9)][case % 3].clone();
        let (page_size, pages) = (1 << (case % 3), 6 + case % 30);
        let calls = prop::collection::vec(knowing_call(), 1..60);
        let calls = calls.new_tree(&mut runner).unwrap().current();
        let config = PoolConfig::new(pages)
            .with_small_pages()
            .with_page_size(page_size);
        let config = config.with_pattern(pattern.clone(), 1, 1).with_rollback(4);
        let config = config
            .with_prefix_reuse(3)
            .with_hash_mask(if case % 2 == 0 { 1 } else { u64::MAX });
        found += run(Machine::new(config, pattern, 1, 4, true), pages, &calls);
    }
    assert!(found > 500, "{found} tokens were found");
}
