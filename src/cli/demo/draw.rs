//! The volume as a small map in the terminal.

use std::io::IsTerminal;

const COLUMNS: u64 = 64;
const ROWS: u64 = 6;

/// Draws `blocks` blocks: a cell is a stretch of the volume, marked by what happened most notably in
/// it.
pub(super) fn map(blocks: u64, allocated: &[u64], changed: &[u64], punched: &[u64]) -> String {
    let cells = COLUMNS * ROWS;
    let cell_of = |block: u64| (u128::from(block) * u128::from(cells) / u128::from(blocks.max(1))) as usize;
    let mut marks = vec![Mark::Hole; cells as usize];
    for (mark, list) in [(Mark::Allocated, allocated), (Mark::Changed, changed), (Mark::Punched, punched)] {
        for block in list {
            let cell = &mut marks[cell_of(*block)];
            *cell = (*cell).max(mark);
        }
    }
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let mut text = String::new();
    for row in marks.chunks(COLUMNS as usize) {
        text.push_str("      ");
        for mark in row {
            text.push_str(&mark.paint(colour));
        }
        text.push('\n');
    }
    let legend = [Mark::Hole, Mark::Allocated, Mark::Changed, Mark::Punched]
        .map(|mark| format!("{} {}", mark.paint(colour), mark.name()));
    text.push_str(&format!("      {}\n", legend.join("   ")));
    text
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mark {
    Hole,
    Allocated,
    Changed,
    Punched,
}

impl Mark {
    fn name(self) -> &'static str {
        match self {
            Mark::Hole => "hole",
            Mark::Allocated => "allocated",
            Mark::Punched => "changed: punched",
            Mark::Changed => "changed: written",
        }
    }

    fn paint(self, colour: bool) -> String {
        let (glyph, code) = match self {
            Mark::Hole => ('·', "2"),
            Mark::Allocated => ('▒', "36"),
            Mark::Punched => ('○', "33"),
            Mark::Changed => ('█', "31"),
        };
        if colour { format!("\x1b[{code}m{glyph}\x1b[0m") } else { glyph.to_string() }
    }
}
