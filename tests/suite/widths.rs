//! Heads of every width, and strided layouts of other kinds than those of a pattern.

burn_blocksparse_tests::tests!(widths: every_width_equals_f64, strided_layouts_of_other_kinds);
