//! Maps of volumes, for the terminal and as one HTML file: what holds data, what changed, and a history of both. They are
//! read from a repository or asked of a driver; the drawing is pure.

mod html;

use std::collections::BTreeMap;
use std::ops::Range;

use base::{Endpoint, Stop};
use indicatif::HumanBytes;
use jiff::Timestamp;
use serde::Serialize;
use shell::plain;
use snapshot_metadata_client::Blocks;
use tokio::runtime::Handle;

use crate::error::{Error, Result};
use crate::repository::index::{About, CELLS, Cells};
use crate::repository::pack::Packs;
use crate::repository::writer::filled;
use crate::repository::{BLOCK, Index, Kind, Repository, SEGMENT};
use crate::wait::wait;

pub use html::{html, write};

/// The maps of one backup, or of two snapshots.
#[derive(Debug, Serialize)]
pub struct Picture {
    pub title: String,
    pub facts: Vec<String>,
    /// Bytes of the volume.
    pub size: u64,
    /// For each of 1024 parts, how much of it holds data: 0 nothing, 255 all.
    pub allocated: Vec<u8>,
    /// The same of what changed; none where all was read.
    pub changed: Option<Vec<u8>>,
    /// The backup, where it is one.
    pub about: Option<About>,
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
    facts.extend(about.base.as_ref().map(|base| format!("based on {base}")));
    facts.extend(about.why.as_ref().map(|why| format!("full because {why}")));
    Ok(Picture {
        title: format!("{} {}", shown(&about.volume), shown(&about.id)),
        facts,
        size: about.size,
        allocated: allocated.finish(),
        changed: (about.kind == Kind::Incremental).then(|| index.changed.clone()),
        about: Some(about.clone()),
    })
}

/// The maps of all backups of a volume, or of all volumes. One whose index is damaged is named and left out.
pub fn of_volume(repository: &Repository, volume: Option<&str>) -> Result<Vec<Picture>> {
    let mut pictures = Vec::new();
    for id in repository.ids()? {
        match repository.index(&id) {
            Ok(index) if volume.is_none_or(|volume| index.about.volume == volume) => {
                match of_backup(repository, &index) {
                    Ok(picture) => pictures.push(picture),
                    Err(error) if error.is_damage() => {
                        tracing::warn!("backup {id}: {}; it is left out", base::report(&error));
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(_) => {}
            // A prune has removed it meanwhile.
            Err(error) if error.is_not_found() => {}
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
        Ok(Picture { title: target.to_owned(), facts, size, allocated, changed, about: None })
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

/// What a part of a map shows: the most notable that happened in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Hole,
    Allocated,
    /// Up to so many quarters of it.
    Changed(u8),
    Cleared,
}

impl Mark {
    const ALL: [Mark; 7] = [
        Mark::Hole,
        Mark::Allocated,
        Mark::Changed(1),
        Mark::Changed(2),
        Mark::Changed(3),
        Mark::Changed(4),
        Mark::Cleared,
    ];

    fn name(self) -> &'static str {
        match self {
            Mark::Hole => "no data",
            Mark::Allocated => "data",
            Mark::Changed(1) => "up to 25 % changed",
            Mark::Changed(2) => "up to 50 % changed",
            Mark::Changed(3) => "up to 75 % changed",
            Mark::Changed(_) => "over 75 % changed",
            Mark::Cleared => "changed to zeros",
        }
    }

    fn paint(self, has_colour: bool) -> String {
        let (glyph, code) = match self {
            Mark::Hole => ('·', "2"),
            Mark::Allocated => ('▒', "36"),
            Mark::Changed(1) => ('▂', "31"),
            Mark::Changed(2) => ('▄', "31"),
            Mark::Changed(3) => ('▆', "31"),
            Mark::Changed(_) => ('█', "31"),
            Mark::Cleared => ('○', "33"),
        };
        if has_colour { format!("\x1b[{code}m{glyph}\x1b[0m") } else { glyph.to_string() }
    }

    fn class(self) -> &'static str {
        match self {
            Mark::Hole => "h",
            Mark::Allocated => "a",
            Mark::Changed(1) => "c1",
            Mark::Changed(2) => "c2",
            Mark::Changed(3) => "c3",
            Mark::Changed(_) => "c4",
            Mark::Cleared => "z",
        }
    }
}

/// Cells in each of the eight lines of a large map.
const LINE: usize = CELLS / 8;

impl Picture {
    /// The marks of equal parts of some cells.
    fn marks(&self, cells: Range<usize>, parts: usize) -> Vec<Mark> {
        let edge = |part: usize| cells.start + cells.len() * part / parts;
        let mark = |part: usize| {
            let within = edge(part)..edge(part + 1).max(edge(part) + 1);
            let has_data = self.allocated[within.clone()].iter().any(|fill| *fill > 0);
            let changed = self.changed.as_ref().map_or(0, |changed| {
                changed[within.clone()].iter().map(|fill| usize::from(*fill)).sum::<usize>()
            });
            match (has_data, changed) {
                (false, 0) => Mark::Hole,
                (true, 0) => Mark::Allocated,
                (false, _) => Mark::Cleared,
                (true, _) => Mark::Changed((changed * 4).div_ceil(within.len() * 255) as u8),
            }
        };
        (0..parts).map(mark).collect()
    }

    fn line(&self, cells: Range<usize>, parts: usize, has_colour: bool) -> String {
        self.marks(cells, parts).iter().map(|mark| mark.paint(has_colour)).collect()
    }

    /// Where a cell begins.
    fn offset(&self, cell: usize) -> u64 {
        (u128::from(self.size) * cell as u128 / CELLS as u128) as u64
    }

    /// The map of the volume in eight lines, for the terminal. Each ends with the offset at which it begins.
    pub fn text(&self, has_colour: bool) -> String {
        let mut text = format!("{}\n", plain(&self.title));
        let mut width = 0;
        for (at, fact) in self.facts.iter().map(|fact| plain(fact)).enumerate() {
            let between = match at {
                0 => "",
                _ if width + fact.len() + 2 > 78 => ",\n",
                _ => ", ",
            };
            width = if between == ",\n" { 0 } else { width + between.len() } + fact.len();
            text.push_str(&format!("{between}{fact}"));
        }
        text.push_str("\n\n");
        for first in (0..CELLS).step_by(LINE) {
            let line = self.line(first..first + LINE, 64, has_colour);
            text.push_str(&format!("  {line}  {}\n", short(self.offset(first))));
        }
        text.push_str(&format!("\n{}", legend(has_colour)));
        text
    }
}

fn legend(has_colour: bool) -> String {
    let glyphs = |marks: &[Mark]| marks.iter().map(|mark| mark.paint(has_colour)).collect::<String>();
    let [hole, data, quarters @ .., cleared] = &Mark::ALL;
    let legend = [
        (&[*hole][..], "no data"),
        (&[*data], "data"),
        (quarters, "changed, by its share"),
        (&[*cleared], "changed to zeros"),
    ];
    let legend = legend.map(|(marks, name)| format!("{} {name}", glyphs(marks)));
    format!("  {}\n", legend.join("   "))
}

/// Bytes in at most eight characters.
fn short(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1023.5 || unit == "PiB" {
            let digits = usize::from(value < 9.95 && (value * 10.0).round() % 10.0 != 0.0);
            return format!("{value:.digits$} {unit}");
        }
        value /= 1024.0;
    }
    unreachable!("the last unit takes all")
}

/// The longest name in a table.
const LONGEST_NAME: usize = 48;

/// A name in a table: on one line, and not too long.
pub fn shown(name: &str) -> String {
    let text = plain(name);
    match text.char_indices().nth(LONGEST_NAME) {
        Some(_) => text.chars().take(LONGEST_NAME - 1).chain(['…']).collect(),
        None => text,
    }
}

/// The backups of a volume.
#[derive(Default)]
struct History<'a> {
    /// The largest size of the volume, which the scale shows.
    most: u64,
    backups: Vec<(&'a Picture, &'a About)>,
}

fn volumes(pictures: &[Picture]) -> BTreeMap<&str, History<'_>> {
    let mut volumes: BTreeMap<&str, History> = BTreeMap::new();
    for (picture, about) in pictures.iter().filter_map(|picture| Some((picture, picture.about.as_ref()?))) {
        let history = volumes.entry(&about.volume).or_default();
        history.most = history.most.max(picture.size).max(1);
        history.backups.push((picture, about));
    }
    volumes
}

/// What was listed as changed; nothing of a full backup.
fn changed(about: &About) -> Option<u64> {
    (about.kind == Kind::Incremental).then_some(about.listed)
}

/// A line a backup, for a terminal of 80 columns.
pub fn history(pictures: &[Picture], has_colour: bool) -> String {
    const PARTS: usize = 32;
    let mut text = String::new();
    for (volume, History { most, backups }) in volumes(pictures) {
        let (half, whole) = (short(most / 2), short(most));
        let scale = format!("0{half:^30}");
        let scale: String = scale.chars().take(PARTS - whole.len()).chain(whole.chars()).collect();
        text.push_str(&format!(
            "{}\n{:27} {scale}  {:>8} {:>8}\n",
            shown(volume),
            "BACKUP",
            "CHANGED",
            "ADDED"
        ));
        for (picture, about) in backups {
            // As wide as the volume was then.
            let parts = (PARTS as u128 * u128::from(picture.size)).div_ceil(u128::from(most)) as usize;
            let line = picture.line(0..CELLS, parts.clamp(1, PARTS), has_colour)
                + &" ".repeat(PARTS - parts.clamp(1, PARTS));
            let changed = changed(about).map_or("full".into(), short);
            text.push_str(&format!(
                "{:27.27} {line}  {changed:>8} {:>8}\n",
                shown(&about.id),
                short(about.added)
            ));
        }
        text.push('\n');
    }
    text.push_str(&legend(has_colour));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(id: &str, kind: Kind, size: u64) -> Picture {
        let (mut allocated, mut cells) = (vec![0; CELLS], vec![0; CELLS]);
        allocated[..512].fill(9);
        (cells[0], cells[1], cells[1023]) = (1, 255, 1);
        let about = About {
            id: id.into(),
            volume: "<v>".into(),
            kind,
            size,
            data: size / 2,
            listed: 3 << 20,
            added: 1 << 20,
            milliseconds: 1500,
            ..About::default()
        };
        Picture {
            title: id.into(),
            facts: vec!["a < b".into(); 20],
            size,
            allocated,
            changed: (kind == Kind::Incremental).then_some(cells),
            about: Some(about),
        }
    }

    #[test]
    fn a_map_shows_what_changed_above_what_is_there() {
        let text = picture("x", Kind::Incremental, 1 << 30).text(false);
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(lines[0], format!("  ▆{}  0 B", "▒".repeat(63)));
        assert_eq!(lines[3], format!("  {}  384 MiB", "▒".repeat(64)));
        assert_eq!(lines[7], format!("  {}○  896 MiB", "·".repeat(63)));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let full = picture("x", Kind::Full, 1 << 30);
        assert_eq!(full.text(false).lines().filter(|line| line.contains('▆')).count(), 1, "the legend alone");
        assert!(picture("x", Kind::Incremental, 8).text(true).contains("\x1b[31m▆\x1b[0m"));
    }

    #[test]
    fn a_history_fits_a_terminal_and_shows_how_a_volume_grew() {
        let pictures =
            [picture("a", Kind::Full, 1 << 30), picture(&"b".repeat(99), Kind::Incremental, 2 << 30)];
        let text = history(&pictures, false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1],
            "BACKUP                      0            1 GiB         2 GiB   CHANGED    ADDED"
        );
        let half = format!("{}{}", "▒".repeat(8), "·".repeat(8));
        assert_eq!(lines[2], format!("{:27} {half:32}      full    1 MiB", "a"));
        let map = format!("▂{}{}○", "▒".repeat(15), "·".repeat(15));
        assert_eq!(lines[3], format!("{} {map}     3 MiB    1 MiB", "b".repeat(27)));
    }

    #[test]
    fn the_share_that_changed_has_a_colour() {
        let mut picture = picture("x", Kind::Incremental, 1 << 30);
        picture.changed = Some(
            [[0; 4], [1, 0, 0, 0], [255, 0, 0, 0], [255, 1, 0, 0], [255, 255, 255, 0], [255; 4]].concat(),
        );
        let classes: Vec<&str> = picture.marks(0..24, 6).iter().map(|mark| mark.class()).collect();
        assert_eq!(classes, ["a", "c1", "c1", "c2", "c3", "c4"]);
    }

    #[test]
    fn bytes_are_short() {
        let shown = [0, 1023, 1024, 10_189, 1 << 20, (1 << 30) - 1, 1 << 44, u64::MAX].map(short);
        assert_eq!(shown, ["0 B", "1023 B", "1 KiB", "10 KiB", "1 MiB", "1 GiB", "16 TiB", "16384 PiB"]);
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
        let one = picture("<script>", Kind::Incremental, 1 << 30);
        for html in [
            html("<b>x", &[one, picture("y", Kind::Full, 1 << 30)]),
            html("<b>x", &[picture("<script>", Kind::Incremental, 8)]),
        ] {
            assert!(!html.contains("<script") && !html.contains("<b>x") && !html.contains("<v>"));
            assert!(html.contains("&lt;script&gt;") && html.contains("&lt;v&gt;"));
            assert!(!html.contains("http") && !html.contains("src="));
        }
        let many: Vec<Picture> = (0..52).map(|at| picture(&at.to_string(), Kind::Full, 1 << 30)).collect();
        assert_eq!(html("v", &many).matches("<tr><th>").count(), 53, "a row a backup, and the head");
    }
}
