//! Maps of volumes, for the terminal and as one HTML file: what holds data, what changed, and a history of both. They are
//! read from a repository or asked of a driver; the drawing is pure.

use std::fmt::Write;
use std::path::Path;

use base::{Endpoint, Stop};
use files::durable::Draft;
use indicatif::HumanBytes;
use jiff::Timestamp;
use serde::Serialize;
use snapshot_metadata_client::Blocks;
use tokio::runtime::Handle;

use crate::error::{Error, Result};
use crate::repository::index::{CELLS, Cells};
use crate::repository::pack::Packs;
use crate::repository::writer::filled;
use crate::repository::{BLOCK, Index, Kind, Repository, SEGMENT};
use crate::restore::{put_over, target_of};
use crate::wait::wait;

/// The maps of one backup, or of two snapshots.
#[derive(Debug, Serialize)]
pub struct Picture {
    /// What it is.
    pub title: String,
    /// Facts in words.
    pub facts: Vec<String>,
    /// Bytes of the volume.
    pub size: u64,
    /// For each of 1024 parts, how much of it holds data: 0 nothing, 255 all.
    pub allocated: Vec<u8>,
    /// The same of what changed; none where all was read.
    pub changed: Option<Vec<u8>>,
    /// Bytes that a bar of the history stands for: what the backup added.
    pub cost: Option<u64>,
}

/// The maps of a backup.
pub fn of_backup(repository: &Repository, index: &Index) -> Result<Picture> {
    let about = &index.about;
    let mut allocated = Cells::new(about.size);
    for of in &index.segments {
        // What the index says of each sixteenth is fine enough where a cell is as large; a smaller volume has few maps.
        if about.size / CELLS as u64 >= SEGMENT / of.fill.len() as u64 {
            filled(of).for_each(|(start, end)| allocated.add(start, end));
            continue;
        }
        for extent in repository.segment(index, of, &mut Packs::default())?.extents {
            let start = u64::from(of.number) * SEGMENT + u64::from(extent.start) * BLOCK;
            allocated.add(start, start + u64::from(extent.blocks) * BLOCK);
        }
    }
    let time =
        Timestamp::from_second(about.created).map(|time| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string());
    let mut facts = vec![
        time.unwrap_or_default(),
        about.kind.to_string(),
        format!("{} volume", HumanBytes(about.size)),
        format!("{} data", HumanBytes(about.data)),
        format!("{} listed", HumanBytes(about.listed)),
        format!("{} read", HumanBytes(about.read)),
        format!("{} added", HumanBytes(about.added)),
        format!("{:.1} s", about.milliseconds as f64 / 1e3),
    ];
    facts.extend(about.base.as_ref().map(|base| format!("over {base}")));
    facts.extend(about.why.as_ref().map(|why| format!("full because {why}")));
    Ok(Picture {
        title: format!("{} {}", shown(&about.volume), shown(&about.id)),
        facts,
        size: about.size,
        allocated: allocated.finish(),
        changed: (about.kind == Kind::Incremental).then(|| index.changed.clone()),
        cost: Some(about.added),
    })
}

/// The maps of all backups of a volume, or of all volumes. One whose index is damaged is named and left out.
pub fn of_volume(repository: &Repository, volume: Option<&str>) -> Result<Vec<Picture>> {
    let mut pictures = Vec::new();
    for id in repository.ids()? {
        match repository.index(&id) {
            Ok(index) if volume.is_none_or(|volume| index.about.volume == volume) => {
                pictures.push(of_backup(repository, &index)?);
            }
            Ok(_) => {}
            Err(error) if error.is_damage() => tracing::warn!("{}; it is left out", base::report(&error)),
            Err(error) => return Err(error),
        }
    }
    Ok(pictures)
}

/// The maps of two snapshots of a driver, or of one.
pub fn of_snapshots(
    runtime: &Handle,
    endpoint: &Endpoint,
    base: Option<&str>,
    target: &str,
    stop: &Stop,
) -> Result<Picture> {
    let refused = |error: snapshot_metadata_client::Error| Error::refused(error.to_string());
    let read = async {
        let client = crate::arguments::driver(endpoint)?;
        let (allocated, held, size) =
            count(client.allocated(target).await.map_err(refused)?).await.map_err(refused)?;
        let mut facts =
            vec![format!("{} volume", HumanBytes(size)), format!("{} allocated", HumanBytes(held))];
        let mut changed = None;
        if let Some(base) = base {
            let (cells, bytes, _) =
                count(client.delta(base, target).await.map_err(refused)?).await.map_err(refused)?;
            facts.push(format!("{} changed since {base}", HumanBytes(bytes)));
            changed = Some(cells);
        }
        Ok(Picture { title: target.to_owned(), facts, size, allocated, changed, cost: None })
    };
    wait(runtime, stop, read)?
}

async fn count(mut blocks: Blocks) -> Result<(Vec<u8>, u64, u64), snapshot_metadata_client::Error> {
    let mut cells = Cells::new(blocks.capacity());
    let mut bytes = 0;
    while let Some(ranges) = blocks.next().await {
        for range in ranges? {
            cells.add(range.offset, range.offset + range.length);
            bytes += range.length;
        }
    }
    Ok((cells.finish(), bytes, blocks.capacity()))
}

/// What a cell shows: the most notable that happened in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Hole,
    Allocated,
    Changed,
    Cleared,
}

impl Mark {
    const ALL: [Mark; 4] = [Mark::Hole, Mark::Allocated, Mark::Changed, Mark::Cleared];

    fn of(allocated: u8, changed: u8) -> Self {
        match (allocated, changed) {
            (0, 0) => Mark::Hole,
            (_, 0) => Mark::Allocated,
            (0, _) => Mark::Cleared,
            (_, _) => Mark::Changed,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Mark::Hole => "no data",
            Mark::Allocated => "data",
            Mark::Changed => "changed",
            Mark::Cleared => "changed to zeros",
        }
    }

    fn paint(self, has_colour: bool) -> String {
        let (glyph, code) = match self {
            Mark::Hole => ('·', "2"),
            Mark::Allocated => ('▒', "36"),
            Mark::Changed => ('█', "31"),
            Mark::Cleared => ('○', "33"),
        };
        if has_colour { format!("\x1b[{code}m{glyph}\x1b[0m") } else { glyph.to_string() }
    }

    fn class(self) -> &'static str {
        match self {
            Mark::Hole => "h",
            Mark::Allocated => "a",
            Mark::Changed => "c",
            Mark::Cleared => "z",
        }
    }
}

impl Picture {
    /// The marks of equal parts, whose number must divide 1024.
    fn marks(&self, parts: usize) -> Vec<Mark> {
        let most = |cells: &[u8]| cells.iter().copied().max().unwrap_or(0);
        let width = CELLS / parts;
        let part = |number: usize| {
            let cells = number * width..(number + 1) * width;
            let changed = self.changed.as_ref().map_or(0, |changed| most(&changed[cells.clone()]));
            Mark::of(most(&self.allocated[cells]), changed)
        };
        (0..parts).map(part).collect()
    }

    /// The map of the volume in eight lines, for the terminal.
    pub fn text(&self, has_colour: bool) -> String {
        let mut text = format!("{}\n{}\n\n", self.title, self.facts.join(", "));
        for line in self.marks(512).chunks(64) {
            let line: String = line.iter().map(|mark| mark.paint(has_colour)).collect();
            text.push_str(&format!("  {line}\n"));
        }
        text.push_str(&format!("\n{}", legend(has_colour)));
        text
    }
}

fn legend(has_colour: bool) -> String {
    let legend = Mark::ALL.map(|mark| format!("{} {}", mark.paint(has_colour), mark.name()));
    format!("  {}\n", legend.join("   "))
}

/// The longest name in a table.
const LONGEST_NAME: usize = 48;

/// Text as a terminal may show it, on one line: what is in a repository, or the name of a file, may hold anything.
pub fn plain(text: &str) -> String {
    let escape = |c: char| match c {
        '\\' | '"' | '\'' => c.to_string(),
        c => c.escape_debug().to_string(),
    };
    text.chars().map(escape).collect()
}

/// The same of a name in a table, and not too long.
pub fn shown(name: &str) -> String {
    let text = plain(name);
    match text.char_indices().nth(LONGEST_NAME) {
        Some(_) => text.chars().take(LONGEST_NAME - 1).chain(['…']).collect(),
        None => text,
    }
}

/// A line a backup, for the terminal.
pub fn history(pictures: &[Picture], has_colour: bool) -> String {
    let mut text = String::new();
    for picture in pictures {
        let line: String = picture.marks(64).iter().map(|mark| mark.paint(has_colour)).collect();
        let cost = picture.cost.map(|cost| format!("{} added", HumanBytes(cost))).unwrap_or_default();
        text.push_str(&format!("  {line}  {}  {cost}\n", picture.title));
    }
    text.push_str(&format!("\n{}", legend(has_colour)));
    text
}

const STYLE: &str = "
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #1c2733; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 1.6rem 0 0; font-weight: 600; }
p { margin: .2rem 0 .5rem; color: #51606f; } svg { display: block; width: 100%; border-radius: 3px; }
.h { fill: #eef1f4; } .a { fill: #7fb2d9; } .c { fill: #d0402b; } .z { fill: #e8a63a; } .b { fill: #51606f; }
p span { display: inline-block; margin-right: .4em; } p span:not(:last-child)::after { content: \" ·\"; }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; padding: 0; } li svg { width: 1em; height: 1em; display: inline-block; vertical-align: -.1em; margin-right: .4em; }
@media (prefers-color-scheme: dark) { body { color: #dfe6ec; background: #12181f; } p { color: #9fb0bf; } .h { fill: #232d38; } .a { fill: #4d86b3; } .b { fill: #9fb0bf; } }
";

/// Rows and columns of a map in HTML.
const COLUMNS: usize = 128;

/// One file that needs no other.
pub fn html(title: &str, pictures: &[Picture]) -> String {
    let mut body = String::new();
    let most = pictures.iter().filter_map(|picture| picture.cost).max().unwrap_or(0).max(1);
    for picture in pictures {
        // To a String: these never fail.
        let _ = writeln!(
            body,
            "<h2>{}</h2>\n<p>{}</p>",
            escaped(&picture.title),
            // No line ends between a number and its unit.
            picture.facts.iter().map(|fact| format!("<span>{}</span> ", escaped(fact))).collect::<String>()
        );
        let rows = CELLS / COLUMNS;
        let _ = writeln!(
            body,
            "<svg viewBox=\"0 0 {COLUMNS} {rows}\" role=\"img\" aria-label=\"{}\" preserveAspectRatio=\"none\" style=\"height:{}px\">",
            escaped(&picture.title),
            rows * 9
        );
        for (row, marks) in picture.marks(CELLS).chunks(COLUMNS).enumerate() {
            let mut column = 0;
            for same in marks.chunk_by(|a, b| a == b) {
                let (width, class) = (same.len(), same[0].class());
                let cell = picture.size / CELLS as u64;
                let first = (row * COLUMNS + column) as u64 * cell;
                let _ = writeln!(
                    body,
                    "<rect class=\"{class}\" x=\"{column}\" y=\"{row}\" width=\"{width}\" height=\".92\"><title>{} from {}: {}</title></rect>",
                    HumanBytes(width as u64 * cell),
                    HumanBytes(first),
                    same[0].name()
                );
                column += width;
            }
        }
        body.push_str("</svg>\n");
        if let Some(cost) = picture.cost.filter(|_| pictures.len() > 1) {
            let width = cost as f64 * 100.0 / most as f64;
            let _ = writeln!(
                body,
                "<svg viewBox=\"0 0 100 1\" preserveAspectRatio=\"none\" style=\"height:6px;margin-top:4px\"><rect class=\"b\" width=\"{width:.2}\" height=\"1\"><title>{} added</title></rect></svg>",
                HumanBytes(cost)
            );
        }
    }
    let legend: String = Mark::ALL
        .iter()
        .map(|mark| {
            format!(
                "<li><svg viewBox=\"0 0 1 1\"><rect class=\"{}\" width=\"1\" height=\"1\"/></svg>{}</li>",
                mark.class(),
                mark.name()
            )
        })
        .collect();
    let bars = match pictures.len() > 1 && pictures.iter().any(|picture| picture.cost.is_some()) {
        true => "<p>The bar below a map is what the backup added to the repository, beside the others.</p>",
        false => "",
    };
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n<title>{0}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{0}</h1>\n<ul>{legend}</ul>\n<p>A map is the volume, from left to right and line by line.</p>\n{bars}\n{body}</body>\n</html>\n",
        escaped(title)
    )
}

/// Writes a page, for others to read, as a whole.
pub fn write(file: &Path, page: &str) -> Result<()> {
    let place = target_of(file)?;
    if place.exists() && !place.is_file() {
        return Err(Error::refused(format!("{} is no file", file.display())));
    }
    let draft = Draft::beside(&place, "writing")?;
    files::change::write(draft.file(), draft.path(), page.as_bytes())?;
    files::change::set_mode(draft.path(), 0o644)?;
    put_over(draft, &place)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(title: &str, changed: bool) -> Picture {
        let (mut allocated, mut cells) = (vec![0; CELLS], vec![0; CELLS]);
        allocated[..512].fill(9);
        (cells[0], cells[1023]) = (1, 1);
        let changed = changed.then_some(cells);
        Picture {
            title: title.into(),
            facts: vec!["a < b".into()],
            size: 1 << 30,
            allocated,
            changed,
            cost: Some(7),
        }
    }

    #[test]
    fn a_map_shows_what_changed_above_what_is_there() {
        let text = picture("x", true).text(false);
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(lines[0], format!("  █{}", "▒".repeat(63)));
        assert_eq!(lines[3], format!("  {}", "▒".repeat(64)));
        assert_eq!(lines[7], format!("  {}○", "·".repeat(63)));
        assert_eq!(
            picture("x", false).text(false).lines().filter(|line| line.contains('█')).count(),
            1,
            "the legend alone"
        );
        assert!(picture("x", true).text(true).contains("\x1b[31m█\x1b[0m"));
    }

    #[test]
    fn names_are_shown_on_one_line() {
        for (name, wanted) in [
            ("ns/data", "ns/data"),
            ("a\"b\\ü", "a\"b\\ü"),
            ("a\nb\u{1b}[31m", "a\\nb\\u{1b}[31m"),
            ("\u{202e}fdp", "\\u{202e}fdp"),
            ("", ""),
        ] {
            assert_eq!(shown(name), wanted);
        }
        assert_eq!(shown(&"x".repeat(48)), "x".repeat(48));
        assert_eq!(shown(&"ü".repeat(49)), "ü".repeat(47) + "…");
    }

    #[test]
    fn html_needs_no_other_file_and_holds_no_foreign_markup() {
        let html = html("<b>", &[picture("<script>alert(1)</script>", true), picture("y", false)]);
        assert!(!html.contains("<script") && !html.contains("<b>") && html.contains("a &lt; b"));
        assert!(!html.contains("http") && !html.contains("src="));
        assert_eq!(html.matches("class=\"c\"").count(), 2, "one cell, and the legend");
        assert_eq!(html.matches("class=\"b\"").count(), 2);
    }
}
