//! What is said, apart from how it is set: text for a terminal and Markdown are two renderings of
//! the same document, so neither can say something that the other leaves out.

use comfy_table::{
    Cell, CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table as TextTable, TableStyle, Width,
};

use super::svg::{Svg, escaped as escaped_html};
use crate::wording::printable;

/// Longest single text; everything longer is somebody's attempt to flood a terminal.
const LIMIT: usize = 4000;
/// Below this no table is readable, whatever the terminal says.
const NARROWEST: u16 = 60;

/// Cells that line up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Column {
    title: String,
    right: bool,
}

impl Table {
    /// A table with these titles; those with a leading ">" are numbers and stand to the right.
    pub(super) fn new(titles: &[&str]) -> Self {
        let column = |title: &&str| match title.strip_prefix('>') {
            Some(title) => Column { title: title.to_owned(), right: true },
            None => Column { title: (*title).to_owned(), right: false },
        };
        Self { columns: titles.iter().map(column).collect(), rows: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len(), "a row must fit its table");
        self.rows.push(cells);
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Block {
    Loud(String),
    Heading(String),
    Paragraph(String),
    Code(Vec<String>),
    List(Vec<String>),
    Facts(Vec<(String, String)>),
    Table(Table),
    /// A picture, and what it shows in a sentence; only a page has room for it.
    Figure(Svg, String),
}

/// A sequence of blocks.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Document {
    blocks: Vec<Block>,
}

impl Document {
    /// What must be seen before anything else is read.
    pub(super) fn loud(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Loud(text.into()));
    }

    pub(super) fn heading(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Heading(text.into()));
    }

    pub(super) fn paragraph(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Paragraph(text.into()));
    }

    /// Lines to copy as they are.
    pub(super) fn code(&mut self, lines: Vec<String>) {
        self.blocks.push(Block::Code(lines));
    }

    pub(super) fn list(&mut self, items: Vec<String>) {
        self.blocks.push(Block::List(items));
    }

    pub(super) fn facts(&mut self, facts: Vec<(String, String)>) {
        self.blocks.push(Block::Facts(facts));
    }

    pub(super) fn table(&mut self, table: Table) {
        self.blocks.push(Block::Table(table));
    }

    /// A picture with what it shows; text and Markdown leave it out.
    pub(super) fn figure(&mut self, svg: Svg, caption: impl Into<String>) {
        self.blocks.push(Block::Figure(svg, caption.into()));
    }

    /// All that is no picture, and no heading of pictures alone.
    fn without_figures(&self) -> Vec<&Block> {
        let is_figure = |block: &Block| matches!(block, Block::Figure(..));
        let heads_figures_alone = |index: usize| {
            let below = &self.blocks[index + 1..];
            let next = below.iter().find(|block| !is_figure(block));
            below.first().is_some_and(is_figure) && matches!(next, None | Some(Block::Heading(_)))
        };
        let shown = self.blocks.iter().enumerate().filter(|(index, block)| {
            let is_hidden = matches!(block, Block::Heading(_)) && heads_figures_alone(*index);
            !is_figure(block) && !is_hidden
        });
        shown.map(|(_, block)| block).collect()
    }

    /// For a terminal of `width` columns, or for a file: then nothing is folded.
    pub(super) fn text(&self, width: Option<u16>) -> String {
        let width = width.map(|width| width.max(NARROWEST));
        let columns = width.map(usize::from);
        let mut text = String::new();
        let mut previous: Option<&Block> = None;
        for block in self.without_figures() {
            // A heading belongs to what follows it, and loud lines stand together.
            let together = matches!(
                (previous, block),
                (None | Some(Block::Heading(_)), _) | (Some(Block::Loud(_)), Block::Loud(_))
            );
            if !together {
                text.push('\n');
            }
            match block {
                Block::Loud(loud) => fold(&mut text, &format!("*** {} ***", clean(loud)), columns, ["", "    "]),
                Block::Heading(words) | Block::Paragraph(words) => fold(&mut text, &clean(words), columns, ["", ""]),
                Block::Code(lines) => {
                    for line in lines {
                        // Never folded: a line broken in two is not the line to copy.
                        fold(&mut text, &clean(line), None, ["  ", ""]);
                    }
                }
                Block::List(items) => {
                    for item in items {
                        fold(&mut text, &clean(item), columns, ["  - ", "    "]);
                    }
                }
                Block::Facts(facts) => {
                    let longest = facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
                    let indent = " ".repeat(longest + 4);
                    for (name, value) in facts {
                        let lead = format!("  {name:longest$}  ");
                        fold(&mut text, &clean(value), columns, [&lead, &indent]);
                    }
                }
                Block::Table(table) => text_table(&mut text, table, width),
                Block::Figure(..) => {}
            }
            previous = Some(block);
        }
        text
    }

    /// For a page.
    pub(super) fn markdown(&self) -> String {
        let render = |block: &Block| -> Vec<String> {
            match block {
                Block::Loud(loud) => vec![format!("> **{}**", escaped(loud))],
                Block::Heading(heading) => vec![format!("## {}", escaped(heading))],
                Block::Paragraph(paragraph) => vec![escaped(paragraph)],
                // Indented, not fenced: no content can end an indented block.
                Block::Code(lines) => lines.iter().map(|line| format!("    {}", clean(line))).collect(),
                Block::List(items) => items.iter().map(|item| format!("- {}", escaped(item))).collect(),
                Block::Facts(facts) => {
                    facts.iter().map(|(name, value)| format!("- {}: {}", escaped(name), escaped(value))).collect()
                }
                Block::Table(table) => markdown_table(table),
                Block::Figure(..) => Vec::new(),
            }
        };
        let blocks: Vec<String> = self.without_figures().into_iter().map(|block| render(block).join("\n")).collect();
        format!("{}\n", blocks.join("\n\n"))
    }

    /// The body of a page.
    pub(super) fn html(&self) -> String {
        let mut text = String::new();
        let mut figures = 0;
        for block in &self.blocks {
            let drawn = match block {
                Block::Loud(loud) => format!("<p class=\"loud\" role=\"note\">{}</p>", html(loud)),
                Block::Heading(heading) => format!("<h2>{}</h2>", html(heading)),
                Block::Paragraph(paragraph) => format!("<p>{}</p>", html(paragraph)),
                Block::Code(lines) => {
                    let lines: Vec<String> = lines.iter().map(|line| html(line)).collect();
                    format!("<pre><code>{}</code></pre>", lines.join("\n"))
                }
                Block::List(items) => {
                    let items: Vec<String> = items.iter().map(|item| format!("<li>{}</li>", html(item))).collect();
                    format!("<ul>\n{}\n</ul>", items.join("\n"))
                }
                Block::Facts(facts) => {
                    let facts: Vec<String> = facts
                        .iter()
                        .map(|(name, value)| format!("<div><dt>{}</dt><dd>{}</dd></div>", html(name), html(value)))
                        .collect();
                    format!("<dl>\n{}\n</dl>", facts.join("\n"))
                }
                Block::Table(table) => html_table(table),
                Block::Figure(svg, caption) => {
                    figures += 1;
                    format!(
                        "<figure>\n<div class=\"scroll\" tabindex=\"0\">\n{}\n</div>\n<figcaption>{}</figcaption>\n</figure>",
                        svg.finish(figures),
                        html(caption)
                    )
                }
            };
            text.push_str(&drawn);
            text.push('\n');
        }
        text
    }
}

fn clean(text: &str) -> String {
    printable(text, LIMIT)
}

/// Markdown and HTML both see marks in plain text; names from outside must not become either.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in clean(text).chars() {
        if matches!(character, '|' | '<' | '>' | '`' | '*' | '[' | ']' | '\\') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// Appends `content`, its first line after `leads[0]` and those it is folded into after `leads[1]`.
fn fold(text: &mut String, content: &str, columns: Option<usize>, leads: [&str; 2]) {
    let mut line = leads[0].to_owned();
    let mut length = line.chars().count();
    let mut fresh = true;
    for word in content.split(' ') {
        let word_length = word.chars().count();
        if !fresh && columns.is_some_and(|columns| length + 1 + word_length > columns) {
            text.push_str(line.trim_end());
            text.push('\n');
            leads[1].clone_into(&mut line);
            length = line.chars().count();
            fresh = true;
        }
        if !fresh {
            line.push(' ');
            length += 1;
        }
        line.push_str(word);
        length += word_length;
        fresh = false;
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

/// No vertical lines: what is copied from a terminal stays words and numbers.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('-'));
const INDENT: &str = "  ";
const GAP: u16 = 2;
/// What a column keeps however little room there is.
const NARROWEST_COLUMN: usize = 3;

fn text_table(text: &mut String, table: &Table, width: Option<u16>) {
    let mut drawn = TextTable::new();
    drawn.load_style(STYLE);
    let align = |content: &str, column: &Column| {
        let alignment = if column.right { CellAlignment::Right } else { CellAlignment::Left };
        Cell::new(clean(content)).set_alignment(alignment)
    };
    drawn.set_header(table.columns.iter().map(|column| align(&column.title, column)).collect::<Vec<_>>());
    for row in &table.rows {
        drawn.add_row(row.iter().zip(&table.columns).map(|(cell, column)| align(cell, column)).collect::<Vec<_>>());
    }
    drawn.set_content_arrangement(ContentArrangement::Disabled);
    for (index, column) in drawn.column_iter_mut().enumerate() {
        column.set_padding((if index == 0 { 0 } else { GAP }, 0));
    }
    if let Some(width) = width {
        let available = usize::from(width).saturating_sub(INDENT.len());
        drawn.set_content_arrangement(ContentArrangement::Dynamic).set_width(available as u16);
        let gaps = (0..table.columns.len()).map(|index| if index == 0 { 0 } else { GAP });
        let widths = column_widths(table, available.saturating_sub(usize::from(gaps.clone().sum::<u16>())));
        for ((column, content), gap) in drawn.column_iter_mut().zip(widths).zip(gaps) {
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(content as u16 + gap)));
        }
    }
    for line in drawn.lines() {
        text.push_str(INDENT);
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// Content widths that fit into `available` columns. Where they must shrink, text shrinks first and
/// figures last, each between words as long as there are any: a broken number is misread.
fn column_widths(table: &Table, available: usize) -> Vec<usize> {
    let length = |text: &str| clean(text).chars().count();
    let longest_word = |text: &str| clean(text).split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
    let cells = |index: usize| table.rows.iter().filter_map(move |row| row.get(index));
    let measure = |index: usize, title: &dyn Fn(&str) -> usize, cell: &dyn Fn(&str) -> usize| {
        cells(index).map(|text| cell(text)).chain([title(&table.columns[index].title)]).max().unwrap_or(0)
    };
    let all = || 0..table.columns.len();
    let mut widths: Vec<usize> = all().map(|index| measure(index, &length, &length)).collect();
    let words: Vec<usize> = all().map(|index| measure(index, &longest_word, &longest_word)).collect();
    let kept: Vec<usize> = all()
        .map(|index| if table.columns[index].right { measure(index, &longest_word, &length) } else { words[index] })
        .collect();
    let mut excess = widths.iter().sum::<usize>().saturating_sub(available);
    while excess > 0 {
        let room = |index: usize, least: &[usize]| widths[index].saturating_sub(least[index]);
        let candidate = all()
            .filter(|index| widths[*index] > NARROWEST_COLUMN)
            .max_by_key(|index| (room(*index, &kept), room(*index, &words), widths[*index]));
        let Some(candidate) = candidate else { break };
        widths[candidate] -= 1;
        excess -= 1;
    }
    widths
}

fn html(text: &str) -> String {
    escaped_html(text, LIMIT)
}

fn html_table(table: &Table) -> String {
    /// Cells as short as this stay on one line.
    const TIGHT: usize = 28;
    let class = |index: usize, column: &Column| {
        let tight = table.rows.iter().filter_map(|row| row.get(index)).all(|cell| cell.chars().count() <= TIGHT);
        match (column.right, tight) {
            (true, true) => " class=\"number tight\"",
            (true, false) => " class=\"number\"",
            (false, true) => " class=\"tight\"",
            (false, false) => "",
        }
    };
    let classes: Vec<&str> = table.columns.iter().enumerate().map(|(index, column)| class(index, column)).collect();
    let titles: Vec<String> = table
        .columns
        .iter()
        .map(|column| {
            let side = if column.right { " class=\"number\"" } else { "" };
            format!("<th scope=\"col\"{side}>{}</th>", html(&column.title))
        })
        .collect();
    let titles = titles.concat();
    let row = |cells: &Vec<String>| {
        let cells: Vec<String> =
            cells.iter().zip(&classes).map(|(cell, class)| format!("<td{class}>{}</td>", html(cell))).collect();
        let cells = cells.concat();
        format!("<tr>{cells}</tr>")
    };
    let rows: Vec<String> = table.rows.iter().map(row).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\"><table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{}\n</tbody>\n</table></div>",
        rows.join("\n")
    )
}

fn markdown_table(table: &Table) -> Vec<String> {
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let rule = |column: &Column| if column.right { "---:" } else { "---" }.to_owned();
    let mut lines = vec![
        line(table.columns.iter().map(|column| escaped(&column.title)).collect()),
        line(table.columns.iter().map(rule).collect()),
    ];
    lines.extend(table.rows.iter().map(|row| line(row.iter().map(|cell| escaped(cell)).collect())));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Document {
        let mut document = Document::default();
        document.loud("SIMULATED: not real");
        document.heading("A heading");
        document.paragraph("A paragraph of several words that a narrow terminal has to fold somewhere in the middle.");
        document.list(vec!["one item of several words that a narrow terminal has to fold somewhere".to_owned()]);
        document.facts(vec![
            ("seed".to_owned(), "7".to_owned()),
            ("noise floor".to_owned(), "several words that a narrow terminal has to fold somewhere".to_owned()),
        ]);
        document.code(vec!["NCCL_PROTO=LL".to_owned()]);
        let mut table = Table::new(&["name", ">count"]);
        table.row(vec!["a".to_owned(), "1".to_owned()]);
        table.row(vec!["b".to_owned(), "1,000".to_owned()]);
        document.table(table);
        document
    }

    #[test]
    fn text_folds_to_the_width() {
        let text = sample().text(Some(60));
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn tables_shrink_between_words_and_only_as_far_as_they_must() {
        let mut table = Table::new(&["name", ">95 % interval", "where"]);
        table.row(vec!["all-reduce bf16".to_owned(), "-24.1 to -21.7".to_owned(), "words ".repeat(12)]);
        assert_eq!(column_widths(&table, 200), [15, 14, 72]);
        assert_eq!(column_widths(&table, 101), [15, 14, 72]);
        assert_eq!(column_widths(&table, 60), [15, 14, 31]);
        assert_eq!(column_widths(&table, 30), [10, 14, 6]);
        assert_eq!(column_widths(&table, 23), [10, 8, 5]);
        assert_eq!(column_widths(&table, 0), [3, 3, 3]);
    }

    #[test]
    fn a_page_says_the_same_and_takes_nothing_for_markup() {
        let mut document = sample();
        document.heading("</h2><script>alert(1)</script>");
        let mut table = Table::new(&["<b>", ">n"]);
        table.row(vec!["\" onload=\"x".to_owned(), "&".to_owned()]);
        document.table(table);
        document.figure(Svg::new(10.0, 10.0, "a picture", "of nothing"), "<i>nothing</i>");
        let page = document.html();
        assert!(!page.contains("<script>") && !page.contains("<b>") && !page.contains("<i>"), "{page}");
        insta::assert_snapshot!(page);
        assert!(!document.text(None).contains("nothing") && !document.markdown().contains("picture"));
    }

    #[test]
    fn a_heading_of_pictures_alone_is_on_the_page_alone() {
        let figure = |document: &mut Document| document.figure(Svg::new(10.0, 10.0, "a picture", "of nothing"), "seen");
        let mut document = Document::default();
        document.heading("Pictures alone");
        figure(&mut document);
        figure(&mut document);
        document.heading("A picture and words");
        figure(&mut document);
        document.paragraph("Words.");
        document.heading("Nothing yet");
        document.heading("The last pictures");
        figure(&mut document);
        assert_eq!(document.text(None), "A picture and words\nWords.\n\nNothing yet\n");
        assert_eq!(document.markdown(), "## A picture and words\n\nWords.\n\n## Nothing yet\n");
        assert_eq!(document.html().matches("<h2>").count(), 4);
    }

    #[test]
    fn markdown_is_plain() {
        insta::assert_snapshot!(sample().markdown());
    }

    #[test]
    fn names_from_outside_are_neither_markup_nor_escape_sequences() {
        let mut document = Document::default();
        document.paragraph("<script>*a*|b\u{1b}[31m\nNCCL_P2P_LEVEL");
        assert_eq!(document.markdown(), "\\<script\\>\\*a\\*\\|b?\\[31m NCCL_P2P_LEVEL\n");
        assert_eq!(document.text(None), "<script>*a*|b?[31m NCCL_P2P_LEVEL\n");
    }
}
