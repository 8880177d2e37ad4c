//! Tables of text.

use std::iter;

/// Rows under the names of their columns, the first of which is aligned to the left. A column without any value is left out.
pub fn table<const N: usize>(names: [&str; N], rows: &[[String; N]]) -> String {
    let length = |text: &String| text.chars().count();
    let names = names.map(str::to_owned);
    let widths: Vec<Option<usize>> = (0..N)
        .map(|column| {
            let widest = rows.iter().map(|row| length(&row[column])).max();
            let widest = widest.filter(|widest| *widest > 0)?;
            Some(widest.max(length(&names[column])))
        })
        .collect();
    let line = |cells: &[String; N]| {
        let cells = cells.iter().zip(&widths).enumerate();
        let shown = cells.filter_map(|(column, (cell, width))| {
            let width = (*width)?;
            Some(match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            })
        });
        shown.collect::<Vec<_>>().join("  ")
    };
    let lines: Vec<String> = iter::once(&names).chain(rows).map(line).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_without_values_are_left_out() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned);
        let rows = [row(["local:8", "", "1.5 ×"]), row(["all", "", ""])];
        let text = table(["pattern", "of peak", "ms"], &rows);
        assert_eq!(text, "pattern     ms\nlocal:8  1.5 ×\nall           ");
    }
}
