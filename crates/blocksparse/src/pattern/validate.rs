//! Checks of a pattern's parameters.

use super::Pattern;
use super::attends::MAX_DRAWN;
use crate::LayoutError;

/// Exclusive bound of windows, strides and the like, so that positions fit in i64 and sums of a few of them in usize.
const MAX_PARAMETER: usize = match 1usize.checked_shl(40) {
    Some(most) => most,
    // On 32-bit WebAssembly.
    None => usize::MAX >> 2,
};

impl Pattern {
    /// Checks every parameter for a layout with `heads` heads.
    ///
    /// # Errors
    /// [`LayoutError::Pattern`] names the first parameter that is out of range.
    pub fn validate(&self, heads: usize) -> Result<(), LayoutError> {
        let check = Check { pattern: self };
        match self {
            Self::Dense | Self::Causal | Self::FromFn(_) => Ok(()),
            Self::PrefixLm { prefix } => check.between("prefix", 0, *prefix),
            Self::Local { window } => check.positive("window", *window),
            Self::Streaming { window, sink } => {
                check.positive("window", *window)?;
                check.between("sink", 0, *sink)
            }
            Self::Strided { stride } => check.positive("stride", *stride),
            Self::Fixed {
                stride,
                columns,
                num_verts,
            } => check.fixed(heads, *stride, *columns, *num_verts),
            Self::Window { reach, dilation } => {
                check.between("reach", 0, *reach)?;
                check.positive("dilation", *dilation)?;
                check.between("reach · dilation", 0, reach.saturating_mul(*dilation))
            }
            Self::Chunked {
                size,
                before,
                after,
            } => {
                check.positive("size", *size)?;
                check.between("before · size", 0, before.saturating_mul(*size))?;
                check.between("after · size", 0, after.saturating_mul(*size))
            }
            Self::Columns {
                stride,
                columns,
                num_verts,
            } => check.groups("columns", *stride, *columns, *num_verts),
            Self::Rows {
                stride,
                rows,
                num_verts,
            } => check.groups("rows", *stride, *rows, *num_verts),
            Self::Global { ranges } | Self::GlobalKeys { ranges } => check.ranges(ranges),
            Self::VerticalSlash { vertical, slash } => {
                check.ascending("vertical", vertical)?;
                check.ascending("slash", slash)
            }
            Self::Documents { starts } => check.ascending("starts", starts),
            Self::Packed { starts, pattern } => {
                check.ascending("starts", starts)?;
                pattern.validate(heads)
            }
            Self::RandomBlocks {
                block,
                blocks,
                count,
                ..
            } => {
                check.positive("block", *block)?;
                check.positive("blocks", *blocks)?;
                check.between("block · blocks", 1, block.saturating_mul(*blocks))?;
                if *count > MAX_DRAWN {
                    return check.error("count", format!("at most {MAX_DRAWN}"), count);
                }
                Ok(())
            }
            Self::Union(parts) | Self::Intersection(parts) => check.parts(heads, parts),
            Self::PerHead(parts) => {
                check.positive("the number of parts", parts.len())?;
                if !heads.is_multiple_of(parts.len()) {
                    let expected = format!("a multiple of the {} patterns", parts.len());
                    return check.error("heads", expected, heads);
                }
                check.parts(heads, parts)
            }
        }
    }
}

/// Checks of one pattern. Errors name the pattern.
struct Check<'a> {
    pattern: &'a Pattern,
}

impl Check<'_> {
    fn error(
        &self,
        argument: &'static str,
        expected: String,
        got: impl ToString,
    ) -> Result<(), LayoutError> {
        Err(LayoutError::Pattern {
            pattern: self.pattern.to_string(),
            argument,
            expected,
            got: got.to_string(),
        })
    }

    fn between(&self, argument: &'static str, min: usize, value: usize) -> Result<(), LayoutError> {
        match value {
            value if (min..=MAX_PARAMETER).contains(&value) => Ok(()),
            _ => self.error(
                argument,
                format!("between {min} and {MAX_PARAMETER}"),
                value,
            ),
        }
    }

    fn positive(&self, argument: &'static str, value: usize) -> Result<(), LayoutError> {
        self.between(argument, 1, value)
    }

    fn ascending(&self, argument: &'static str, list: &[usize]) -> Result<(), LayoutError> {
        if let Some(pair) = list.windows(2).find(|pair| pair[0] >= pair[1]) {
            let got = format!("{} before {}", pair[0], pair[1]);
            return self.error(argument, "ascending".to_owned(), got);
        }
        list.last()
            .map_or(Ok(()), |&last| self.between(argument, 0, last))
    }

    fn ranges(&self, ranges: &[(usize, usize)]) -> Result<(), LayoutError> {
        let mut end = 0;
        for (index, &(first, after)) in ranges.iter().enumerate() {
            self.between("the end of a range", 1, after)?;
            if first >= after || (index > 0 && first < end) {
                let expected = "ascending and disjoint".to_owned();
                return self.error("ranges", expected, format!("{first}..{after}"));
            }
            end = after;
        }
        Ok(())
    }

    fn fixed(
        &self,
        heads: usize,
        stride: usize,
        columns: usize,
        num_verts: usize,
    ) -> Result<(), LayoutError> {
        self.groups("columns", stride, columns, num_verts)?;
        if !stride.is_multiple_of(columns) {
            let expected = format!("a multiple of columns = {columns}");
            return self.error("stride", expected, stride);
        }
        if !heads.is_multiple_of(num_verts) {
            let expected = format!("a multiple of num_verts = {num_verts}");
            return self.error("heads", expected, heads);
        }
        Ok(())
    }

    /// Checks that `num_verts` groups of `width` fit in a window.
    fn groups(
        &self,
        name: &'static str,
        stride: usize,
        width: usize,
        num_verts: usize,
    ) -> Result<(), LayoutError> {
        self.positive("stride", stride)?;
        self.positive(name, width)?;
        self.positive("num_verts", num_verts)?;
        if num_verts.checked_mul(width).is_none_or(|all| all > stride) {
            let expected = format!("at most stride = {stride}");
            return self.error(name, expected, format!("{num_verts} groups of {width}"));
        }
        Ok(())
    }

    fn parts(&self, heads: usize, parts: &[Pattern]) -> Result<(), LayoutError> {
        self.positive("the number of parts", parts.len())?;
        parts.iter().try_for_each(|part| part.validate(heads))
    }
}
