//! Text tables.

use std::iter;

/// Formats rows under their column names, separated by two spaces; the first column is aligned to the left. Empty columns are omitted.
pub fn table<const N: usize>(names: &str, rows: &[[String; N]]) -> String {
    let mut lines = vec![String::new(); rows.len() + 1];
    for (column, name) in names.split("  ").enumerate() {
        let cells = || rows.iter().map(|row| row[column].as_str());
        if cells().all(str::is_empty) {
            continue;
        }
        let cells = || iter::once(name).chain(cells());
        let widest = cells().map(|cell| cell.chars().count()).max();
        let width = widest.unwrap_or_default();
        for (line, cell) in lines.iter_mut().zip(cells()) {
            *line += &match column {
                0 => format!("{cell:<width$}"),
                _ => format!("  {cell:>width$}"),
            };
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_without_values_are_left_out() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned);
        let rows = [row(["local:8", "", "1.5 ×"]), row(["all", "", ""])];
        let text = table("pattern  of peak  ms", &rows);
        assert_eq!(text, "pattern     ms\nlocal:8  1.5 ×\nall           ");
    }
}
