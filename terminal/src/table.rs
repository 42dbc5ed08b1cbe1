//! Tables of text.

/// How tables are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Columns of aligned text.
    Text,
    /// A GitHub table.
    Markdown,
}

/// Text in rows and columns: the first column is flush left, the others are flush right.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table of these columns.
    pub fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(ToString::to_string).collect()] }
    }

    /// Appends a row of as many cells as there are columns.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// The lines of the table as aligned text, each indented by two spaces.
    pub fn indented(&self) -> String {
        let lines = self.lines(Style::Text);
        lines.iter().map(|line| format!("  {line}\n")).collect()
    }

    /// The table with an empty line after it.
    pub fn render(&self, style: Style) -> String {
        self.lines(style).join("\n") + "\n\n"
    }

    fn lines(&self, style: Style) -> Vec<String> {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        let (left, between, right) = match style {
            Style::Text => ("", "  ", ""),
            Style::Markdown => ("| ", " | ", " |"),
        };
        let line = |row: &[String]| {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            let cells: Vec<String> = cells.collect();
            format!("{left}{}{right}", cells.join(between)).trim_end().to_owned()
        };
        let mut lines: Vec<String> = self.rows.iter().map(|row| line(row)).collect();
        if style == Style::Markdown {
            let rule = |(column, &width): (usize, &usize)| match column {
                0 => "-".repeat(width),
                _ => format!("{}:", "-".repeat(width.saturating_sub(1))),
            };
            lines.insert(1, line(&widths.iter().enumerate().map(rule).collect::<Vec<_>>()));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&["pool", "texts"]);
        table.push(vec!["user-0".to_owned(), "7".to_owned()]);
        table
    }

    #[test]
    fn columns_are_aligned() {
        assert_eq!(table().render(Style::Text), "pool    texts\nuser-0      7\n\n");
        assert_eq!(table().indented(), "  pool    texts\n  user-0      7\n");
    }

    #[test]
    fn markdown_has_a_rule_below_its_header() {
        assert_eq!(table().render(Style::Markdown), "| pool   | texts |\n| ------ | ----: |\n| user-0 |     7 |\n\n");
    }
}
