//! The maps as one HTML file.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

use super::{History, LINE, Mark, Picture, changed, plain, short, shown, volumes};
use crate::error::Result;
use crate::repository::index::CELLS;
use crate::restore::{put_over, target_of};
use files::durable::Draft;

const STYLE: &str = "
body { font: 13px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 90rem; padding: 0 1rem; color: #1c2733; background: #fff; }
h1 { font-size: 1.3rem; margin: 0 0 .5rem; } h2 { font-size: 1.05rem; margin: 1.2rem 0 .3rem; }
p { margin: .2rem 0; color: #51606f; max-width: 70rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 1px .6rem 1px 0; text-align: right; white-space: nowrap; font-weight: 400; } thead th { color: #51606f; }
th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; } th:last-child, td:last-child { width: 100%; padding-right: 0; min-width: 18rem; }
.scale { display: flex; justify-content: space-between; } svg { display: block; width: 100%; height: 16px; }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; padding: 0; margin: .5rem 0; } li svg { width: 1em; height: 1em; display: inline-block; vertical-align: -.1em; margin-right: .4em; }
.h { fill: #e6eaee; } .a { fill: #9cc3e6; } .c1 { fill: #f5c4a5; } .c2 { fill: #ec8f61; } .c3 { fill: #d6502f; } .c4 { fill: #9c1414; } .z { fill: #d9b310; }
@media (prefers-color-scheme: dark) { body { color: #dfe6ec; background: #12181f; } p, thead th { color: #9fb0bf; }
  .h { fill: #232d38; } .a { fill: #35597a; } .c1 { fill: #7a3d2a; } .c2 { fill: #b8512f; } .c3 { fill: #ef7a45; } .c4 { fill: #ffb48a; } .z { fill: #e3c545; } }
";

/// Parts of a map in HTML.
const PARTS: usize = 256;
impl Picture {
    /// A line of a map. `most` bytes would fill its width.
    fn strip(&self, cells: Range<usize>, parts: usize, most: u64) -> String {
        let width = parts as f64 * most as f64 / self.size.max(1) as f64;
        let mut svg = format!("<svg viewBox=\"0 0 {width:.2} 1\" preserveAspectRatio=\"none\" role=\"img\">");
        let mut part = 0;
        for same in self.marks(cells.clone(), parts).chunk_by(|a, b| a == b) {
            let offset = |part: usize| self.offset(cells.start + cells.len() * part / parts);
            let (first, end) = (offset(part), offset(part + same.len()));
            // To a String: this never fails.
            let _ = write!(
                svg,
                "<rect class=\"{}\" x=\"{part}\" width=\"{}\" height=\"1\"><title>{} from {}: {}</title></rect>",
                same[0].class(),
                same.len(),
                short(end - first),
                short(first),
                same[0].name()
            );
            part += same.len();
        }
        svg + "</svg>"
    }
}

/// One file that needs no other.
pub fn html(title: &str, pictures: &[Picture]) -> String {
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
    let mut body = String::new();
    for (volume, History { most, backups }) in volumes(pictures) {
        let scale: String =
            (0..=4).map(|quarter| format!("<span>{}</span>", short(most / 4 * quarter))).collect();
        let heading = match volume == title {
            true => String::new(),
            false => format!("<h2>{}</h2>\n", escaped(&shown(volume))),
        };
        let _ = write!(
            body,
            "{heading}<table>\n<thead><tr><th>Backup</th><th>Kind</th><th>Size</th><th>Data</th><th>Changed</th>\
             <th>Added</th><th>Time</th><th class=\"scale\">{scale}</th></tr></thead>\n<tbody>\n"
        );
        for (picture, about) in backups {
            let _ = writeln!(
                body,
                "<tr><th>{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1} s</td><td>{}</td></tr>",
                escaped(&shown(&about.id)),
                about.kind,
                short(about.size),
                short(about.data),
                changed(about).map(short).unwrap_or_default(),
                short(about.added),
                about.milliseconds as f64 / 1e3,
                picture.strip(0..CELLS, PARTS, most)
            );
        }
        body.push_str("</tbody>\n</table>\n");
    }
    if let [picture] = pictures {
        let facts: Vec<String> = picture.facts.iter().map(|fact| escaped(fact)).collect();
        let _ = writeln!(body, "<h2>{}</h2>\n<p>{}</p>\n<table>", escaped(&picture.title), facts.join(", "));
        for first in (0..CELLS).step_by(LINE) {
            let strip = picture.strip(first..first + LINE, LINE, picture.size);
            let _ =
                writeln!(body, "<tr><th>{}</th><td></td><td>{strip}</td></tr>", short(picture.offset(first)));
        }
        body.push_str("</table>\n<p>Each line begins at the byte on its left.</p>\n");
    }
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n<title>{0}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{0}</h1>\n\
         <p>A map shows the volume from its first byte to its last. Point at a part of it to read where that is.</p>\n<ul>{legend}</ul>\n{WORDS}{body}</body>\n</html>\n",
        escaped(title)
    )
}

/// What the columns mean.
const WORDS: &str = "<p><b>Size</b> is that of the volume, <b>data</b> what is not zero. <b>Changed</b> is what the driver listed since the \
backup before; a full backup reads all data, and its map shows only data. <b>Listed</b> is what the driver said to read, <b>read</b> \
what was read. <b>Added</b> is what the repository grew by, compressed. <b>Time</b> is how long the \
backup took.</p>\n";

/// Writes a page, for others to read, as a whole.
pub fn write(file: &Path, page: &str) -> Result<()> {
    let place = target_of(file)?;
    let draft = Draft::beside(&place, "writing")?;
    files::change::write(draft.file(), draft.path(), page.as_bytes())?;
    files::change::set_mode(draft.path(), 0o644)?;
    put_over(draft, &place)
}

/// Text as it may stand in a page, on one line.
fn escaped(text: &str) -> String {
    plain(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
