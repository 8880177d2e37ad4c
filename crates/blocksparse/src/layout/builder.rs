//! Incremental construction of layouts.

use super::attachments::Attachments;
use super::mask::MaskInterner;
use super::rows::RowRuns;
use super::shape::LayoutShape;
use super::{BlockLayout, HeadPattern, Inner};

/// Distinct masks and distinct block rows, and the pattern of each head of each batch entry.
pub(super) struct LayoutBuilder {
    pub masks: MaskInterner,
    pub patterns: Vec<HeadPattern>,
    pub head_patterns: Vec<u32>,
}

impl LayoutBuilder {
    pub fn new(masks: MaskInterner) -> Self {
        Self {
            masks,
            patterns: Vec::new(),
            head_patterns: Vec::new(),
        }
    }

    /// Returns the index of the pattern with these rows. Adds the pattern if it is new.
    pub fn pattern(&mut self, rows: RowRuns) -> u32 {
        let known = self.patterns.iter().position(|p| p.rows == rows);
        let index = known.unwrap_or_else(|| {
            self.patterns.push(HeadPattern::new(rows));
            self.patterns.len() - 1
        });
        index as u32
    }

    /// Appends a head with these rows.
    pub fn push(&mut self, rows: RowRuns) {
        let pattern = self.pattern(rows);
        self.head_patterns.push(pattern);
    }

    pub fn finish(self, name: String, shape: LayoutShape, batch: Option<usize>) -> BlockLayout {
        BlockLayout {
            inner: std::sync::Arc::new(Inner {
                name,
                shape,
                batch,
                head_patterns: self.head_patterns,
                patterns: self.patterns,
                masks: self.masks.into_masks(),
                parts: None,
                choice: None,
                within: None,
                attachments: Attachments::default(),
            }),
        }
    }
}
