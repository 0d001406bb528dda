//! The charts of docs/benchmarks.md, drawn from the rows of docs/benchmarks.json. `make charts` writes them.

use std::fmt::Write;

use serde_json::Value;

/// Who a figure is of. The index chooses the colour.
const SERIES: [&str; 6] =
    ["btrfs pool", "xfs pool", "dir pool", "deltapath", "another driver or tool", "bare operation"];
const BTRFS: usize = 0;
const XFS: usize = 1;
const DIR: usize = 2;
const OURS: usize = 3;
const OTHER: usize = 4;
const BARE: usize = 5;

const STYLE: &str = "
  text { font: 12px system-ui, sans-serif; fill: #24292f; } .title { font-size: 15px; font-weight: 600; } .head { font-weight: 600; }
  .soft { fill: #59636e; } .paper { fill: #ffffff; stroke: #d1d9e0; } .grid { stroke: #d1d9e0; } polyline { fill: none; stroke-width: 2; }
  .f0, .f3 { fill: #0969da; } .f1 { fill: #1a7f37; } .f2 { fill: #8250df; } .f4 { fill: #bc4c00; } .f5 { fill: #848d97; }
  .s0, .s3 { stroke: #0969da; } .s1 { stroke: #1a7f37; } .s2 { stroke: #8250df; } .s4 { stroke: #bc4c00; } .s5 { stroke: #848d97; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .soft { fill: #9198a1; } .paper { fill: #0d1117; stroke: #3d444d; } .grid { stroke: #3d444d; }
    .f0, .f3 { fill: #4493f8; } .f1 { fill: #3fb950; } .f2 { fill: #ab7df8; } .f4 { fill: #f0883e; } .f5 { fill: #9198a1; }
    .s0, .s3 { stroke: #4493f8; } .s1 { stroke: #3fb950; } .s2 { stroke: #ab7df8; } .s4 { stroke: #f0883e; } .s5 { stroke: #9198a1; }
  }
";
const WIDTH: f64 = 780.0;
/// Of one panel; there are two beside each other.
const PANEL: f64 = 360.0;
const PLOT: f64 = 150.0;
const LABELS: f64 = 140.0;

/// The rows of the tables.
struct Rows(Vec<Value>);

impl Rows {
    /// The first figure with this unit in a part of a cell.
    fn figure(
        &self,
        (table, id, what): (&str, &str, &str),
        cell: &str,
        part: usize,
        unit: &str,
    ) -> Option<f64> {
        let row = self.0.iter().find(|row| row["table"] == table && row["id"] == id && row["what"] == what);
        let row = row.unwrap_or_else(|| panic!("no row {table} {id} {what}"));
        Rows::figure_in(row[cell].as_str().expect("a cell"), part, unit)
    }

    /// Semicolons separate parts. A unit follows its number after a space, or at once: `1.5 ms (1.2 to 2 ms)`, `61525/s`.
    fn figure_in(cell: &str, part: usize, unit: &str) -> Option<f64> {
        let part: String = cell.split(';').nth(part)?.chars().filter(|c| *c != ',').collect();
        let words: Vec<&str> = part.split([' ', '(', ')']).collect();
        words.iter().enumerate().find_map(|(at, word)| {
            let digits = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
            let (number, rest) = word.split_at(digits);
            let next = words.get(at + 1).copied().unwrap_or_default();
            let of = if !rest.is_empty() {
                rest
            } else if next == "to" {
                words.get(at + 3)?
            } else {
                next
            };
            (of == unit || of.strip_suffix("/s") == Some(unit)).then(|| number.parse().ok())?
        })
    }
}

enum Panel {
    /// Lines over named points, on a logarithmic scale.
    Lines { title: &'static str, points: Vec<&'static str>, lines: Vec<(usize, Vec<Option<f64>>)> },
    /// Bars from zero.
    Bars { title: &'static str, unit: &'static str, bars: Vec<(&'static str, usize, f64)> },
}

impl Panel {
    fn height(&self) -> f64 {
        match self {
            Panel::Lines { .. } => PLOT + 60.0,
            Panel::Bars { bars, .. } => 34.0 + 22.0 * bars.len() as f64,
        }
    }

    fn series(&self) -> Vec<usize> {
        match self {
            Panel::Lines { lines, .. } => lines.iter().map(|line| line.0).collect(),
            Panel::Bars { bars, .. } => bars.iter().map(|bar| bar.1).collect(),
        }
    }

    fn draw(&self, svg: &mut String, x: f64, y: f64) {
        match self {
            Panel::Lines { title, points, lines } => {
                head(svg, x, y, title);
                let figures = || lines.iter().flat_map(|line| &line.1).flatten().copied();
                let low = figures().fold(f64::MAX, f64::min).log10().floor() as i32;
                let high = figures().fold(f64::MIN, f64::max).log10().ceil() as i32;
                let (left, top, width) = (x + 52.0, y + 26.0, PANEL - 76.0);
                let at_y = |figure: f64| {
                    top + PLOT - PLOT * (figure.log10() - f64::from(low)) / f64::from(high - low)
                };
                let at_x = |point: usize| left + width * (point as f64 + 0.5) / points.len() as f64;
                for power in low..=high {
                    let figure = 10f64.powi(power);
                    let (right, at) = (left + width, at_y(figure));
                    *svg += &format!(
                        "<line class=\"grid\" x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"
                    );
                    text(svg, left - 6.0, at + 4.0, "soft", "end", &shown(figure, "ms"));
                }
                for (at, point) in points.iter().enumerate() {
                    text(svg, at_x(at), top + PLOT + 17.0, "soft", "middle", point);
                }
                for (series, figures) in lines {
                    let places: Vec<(f64, f64)> = figures
                        .iter()
                        .enumerate()
                        .filter_map(|(at, figure)| Some((at_x(at), at_y((*figure)?))))
                        .collect();
                    let line: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                    *svg += &format!("<polyline class=\"s{series}\" points=\"{}\"/>", line.join(" "));
                    for (x, y) in places {
                        *svg +=
                            &format!("<circle class=\"f{series}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>");
                    }
                }
            }
            Panel::Bars { title, unit, bars } => {
                head(svg, x, y, title);
                let most = bars.iter().map(|bar| bar.2).fold(0.0, f64::max);
                for (at, (label, series, figure)) in bars.iter().enumerate() {
                    let top = y + 28.0 + 22.0 * at as f64;
                    let (left, width) = (x + LABELS, (figure / most * (PANEL - LABELS - 74.0)).max(1.5));
                    text(svg, left - 6.0, top + 13.0, "", "end", label);
                    *svg += &format!(
                        "<rect class=\"f{series}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"17\" rx=\"2\"/>"
                    );
                    text(svg, left + width + 5.0, top + 13.0, "soft", "start", &shown(*figure, unit));
                }
            }
        }
    }
}

fn text(svg: &mut String, x: f64, y: f64, class: &str, anchor: &str, words: &str) {
    *svg +=
        &format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

fn head(svg: &mut String, x: f64, y: f64, title: &str) {
    text(svg, x, y + 13.0, "head", "start", title);
}

/// Three digits, with a unit.
fn shown(figure: f64, unit: &str) -> String {
    match unit {
        "ms" if figure >= 1000.0 => format!("{} s", digits(figure / 1000.0)),
        "/s" => format!("{} k/s", digits(figure / 1000.0)),
        "M" => format!("{} M/s", digits(figure)),
        _ => format!("{} {unit}", digits(figure)),
    }
}

fn digits(figure: f64) -> String {
    let places = (2 - figure.log10().floor() as i32).clamp(0, 2) as usize;
    let text = format!("{figure:.places$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn draw(name: &'static str, title: &str, note: &str, panels: &[Panel]) -> (&'static str, String) {
    let mut body = String::new();
    let mut y = 62.0;
    for pair in panels.chunks(2) {
        for (panel, x) in pair.iter().zip([20.0, 20.0 + PANEL + 20.0]) {
            panel.draw(&mut body, x, y);
            body.push('\n');
        }
        y += pair.iter().map(Panel::height).fold(0.0, f64::max) + 8.0;
    }
    let used: Vec<usize> = panels.iter().flat_map(Panel::series).collect();
    let mut x = 20.0;
    for (series, name) in SERIES.iter().enumerate().filter(|(series, _)| used.contains(series)) {
        body +=
            &format!("<rect class=\"f{series}\" x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" rx=\"2\"/>");
        text(&mut body, x + 18.0, y + 10.0, "", "start", name);
        x += 36.0 + 6.6 * name.len() as f64;
    }
    let height = y + 28.0;
    let mut svg = String::new();
    // To a String: this never fails.
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>",
        WIDTH - 1.0,
        height - 1.0
    );
    text(&mut svg, 20.0, 28.0, "title", "start", title);
    text(&mut svg, 20.0, 47.0, "soft", "start", note);
    (name, svg + &body + "</svg>\n")
}

/// The names of the files, and what is in them.
fn charts(rows: &Rows) -> Vec<(&'static str, String)> {
    type Place = (usize, &'static str, usize);
    // Where the columns of the table of any driver are.
    let columns: [Place; 5] = [
        (BTRFS, "measured", 0),
        (XFS, "measured", 1),
        (DIR, "measured", 2),
        (OTHER, "measured", 3),
        (BARE, "beside", 0),
    ];
    let any = |what: &str, (_, cell, part): Place| rows.figure(("any driver", "", what), cell, part, "ms");
    let changes = |title, call: &str, end: &str| {
        let whats = ["0.01 %", "1 %", "10 %"].map(|share| format!("{call} {share}{end}"));
        let line = |place: Place| (place.0, whats.iter().map(|what| any(what, place)).collect());
        Panel::Lines { title, points: vec!["0.01 %", "1 %", "10 %"], lines: columns.map(line).to_vec() }
    };
    let drivers = |title, what| {
        let names = ["btrfs pool", "xfs pool", "dir pool", "csi-driver-host-path", "a bare copy"];
        let bars = names.iter().zip(columns).map(|(name, place)| (*name, place.0, any(what, place)));
        bars_of(title, "ms", bars)
    };
    let growth = |table, title, what, points: &[&'static str]| {
        let line = |(series, pool, cell)| {
            let figure = |part| rows.figure((table, pool, what), cell, part, "ms");
            (series, (0..points.len()).map(figure).collect::<Vec<_>>())
        };
        let has = |pool| rows.0.iter().any(|row| row["table"] == table && row["id"] == pool);
        let pools = [(BTRFS, "btrfs", "measured"), (XFS, "xfs", "measured"), (DIR, "dir", "measured")];
        let of_pools = pools.into_iter().filter(|place| has(place.1)).map(line);
        let bare = line((BARE, "btrfs", "beside"));
        let lines = of_pools.chain([bare]).filter(|line| line.1.iter().any(Option::is_some));
        Panel::Lines { title, points: points.to_vec(), lines: lines.collect() }
    };
    let sizes = ["1 GiB", "16 GiB", "256 GiB", "4 TiB", "16 TiB"];
    let amounts = ["64 MiB", "256 MiB", "1 GiB", "4 GiB"];
    let data = |title, what| growth("growth of the data", title, what, &amounts);
    let volume = |title, what| growth("growth of the volume", title, what, &sizes);
    let chain = |title, what| growth("growth of the snapshots", title, what, &["1", "10", "100", "1,000"]);
    let numbers = ["10", "100", "1,000", "10,000", "100,000"];
    let far = |title, what, points| growth("growth by powers of ten", title, what, &numbers[..points]);
    let sparse = |title, series, pool| {
        let calls = [
            ("the first snapshot", "a", "first CreateSnapshot, nothing hashed"),
            ("a snapshot after 1 %", "a", "CreateSnapshot after 1 % changed"),
            ("a restore", "i", "restore"),
            ("a clone", "i", "clone of the volume"),
        ];
        let bars = calls.into_iter().flat_map(|(name, id, what)| {
            let what = format!("{what}, 16 TiB sparse, 1 GiB data, {pool}");
            let figure = |cell, part| rows.figure(("table", id, &what), cell, part, "ms");
            [(name, series, figure("measured", 0)), ("bare", BARE, figure("beside", 0))]
        });
        bars_of(title, "ms", bars)
    };
    let writes = |title, id, what: &str, pools: &[(&'static str, usize, &str)]| {
        let bars = pools.iter().flat_map(|(name, series, pool)| {
            let what = format!("random 4 KiB writes to {what}, {pool}");
            let figure = |cell| rows.figure(("table", id, &what), cell, 0, "/s");
            [(*name, *series, figure("measured")), ("a bare loop device", BARE, figure("beside"))]
        });
        bars_of(title, "/s", bars)
    };
    let all = [("btrfs pool", BTRFS, "btrfs"), ("xfs pool", XFS, "xfs"), ("dir pool", DIR, "dir")];
    let text = |end| format!("full backup, 4 GiB of data of which half is text{end}");
    let [quick, borg, restic] =
        [", --compression=-3, against qemu-img", ", against borg", ", against restic"].map(text);
    let backup = |id, what, cell, part| rows.figure(("backup", id, what), cell, part, "s");
    let one = "incremental backup of 1 % of 4 GiB, in a volume of 8 GiB";
    let noise = "full backup, 4 GiB of data in a volume of 8 GiB, noise";
    let restore = "restore of 4 GiB of noise";
    let stream = |table, id, what, cell, part| rows.figure((table, id, what), cell, part, "M");
    let tls = "a stream of 16,777,216 tuples over TLS";
    let mutual = "a stream of 16777216 tuples through the router";
    let socket = "stream of 67,108,864 FIXED_LENGTH tuples";
    vec![
        draw(
            "delta",
            "What a delta costs as more changes",
            "128 MiB of data, by the share that changed. Another driver: csi-driver-host-path. Bare: reading what changed in two files.",
            &[
                changes("At once after the snapshot", "GetMetadataDelta of", ", at once"),
                changes("Later, when the snapshot is hashed", "GetMetadataDelta of", ", later"),
            ],
        ),
        draw(
            "snapshot",
            "What a snapshot costs as more changes",
            "128 MiB of data in a volume of 1 GiB. Another driver: csi-driver-host-path. Bare: a copy of the data.",
            &[
                changes("After a share of the data changed", "CreateSnapshot after", " changed"),
                drivers("The first snapshot", "CreateSnapshot, the first"),
            ],
        ),
        draw(
            "restore",
            "What a restore and a clone cost",
            "CreateVolume, 128 MiB of data in 1 GiB. Bare: a copy of the data, in the quickest run.",
            &[
                drivers("From a snapshot", "CreateVolume from a snapshot"),
                drivers("From a volume", "CreateVolume from a volume"),
            ],
        ),
        draw(
            "sparse",
            "1 GiB of data in a sparse volume of 16 TiB",
            "Bare: the flush and copy of the pool's filesystem, with the search for changes after 1 %.",
            &[sparse("btrfs pool", BTRFS, "btrfs"), sparse("xfs pool", XFS, "xfs")],
        ),
        draw(
            "data",
            "As the data grows",
            "64 MiB to 4 GiB of data in a volume of 16 GiB. Bare: a copy of the data, and reading what changed in two files.",
            &[
                data("CreateSnapshot, the first", "CreateSnapshot, the first"),
                data("CreateVolume from a snapshot", "CreateVolume from a snapshot"),
                data("GetMetadataDelta of 1 %, at once", "GetMetadataDelta of 1 %, at once"),
                data("GetMetadataDelta of 1 %, later", "GetMetadataDelta of 1 %, later"),
            ],
        ),
        draw(
            "volume",
            "As the volume grows",
            "The same 64 MiB of data in volumes of 1 GiB to 16 TiB. Bare: a copy of the data, and reading what changed in two files.",
            &[
                volume("CreateSnapshot, the first", "CreateSnapshot, the first"),
                volume("GetMetadataDelta of 1 %, at once", "GetMetadataDelta of 1 %, at once"),
                volume("GetMetadataDelta of 1 %, later", "GetMetadataDelta of 1 %, later"),
                volume("CreateVolume from a snapshot", "CreateVolume from a snapshot"),
            ],
        ),
        draw(
            "snapshots",
            "As the snapshots of a volume add up",
            "8 MiB of data in 1 GiB, 1 % changed before each snapshot; by the number of snapshots that are there.",
            &[
                chain("CreateSnapshot", "CreateSnapshot after 1 % changed"),
                chain("CreateVolume from a snapshot", "CreateVolume from a snapshot"),
                chain("DeleteSnapshot", "DeleteSnapshot"),
                chain("A delta from the snapshot before", "GetMetadataDelta from the one before"),
                chain("A delta from the first snapshot", "GetMetadataDelta from the first"),
            ],
        ),
        draw(
            "far",
            "By powers of ten",
            "Changed blocks of 4 KiB, spread evenly over 16 TiB; snapshots of a volume of 1 MiB, with up to 4 changed blocks each.",
            &[
                far("A first delta, cold, by blocks", "GetMetadataDelta at once, cold, by changed blocks", 5),
                far(
                    "A delta between any two snapshots",
                    "GetMetadataDelta between any two, by snapshots of a volume",
                    4,
                ),
                far("CreateSnapshot", "CreateSnapshot, by snapshots of a volume", 4),
                far("Start to the first Probe", "start to first Probe, by snapshots of a volume", 4),
            ],
        ),
        draw(
            "writes",
            "Random writes of 4 KiB",
            "Past the page cache, 16 at once. Bare: loop devices on files of the same filesystem.",
            &[
                writes("1 volume, no snapshot", "n", "1 volume without a snapshot", &all),
                writes("16 volumes, no snapshot", "n", "16 volumes without a snapshot", &all),
                writes(
                    "1 volume, right after a snapshot",
                    "o",
                    "1 volume right after a snapshot of each",
                    &all[..2],
                ),
                writes(
                    "16 volumes, right after a snapshot",
                    "o",
                    "16 volumes right after a snapshot of each",
                    &all[..2],
                ),
            ],
        ),
        draw(
            "programs",
            "Backups, and streams over the network",
            "4 GiB of data; streams of 16.8 million tuples, and of 67 million on the socket. Bare: a copy, and an empty gRPC server.",
            &[
                bars_of(
                    "Full backup, half of it text",
                    "s",
                    [
                        ("cbt-backup", OURS, backup("b", &borg, "measured", 0)),
                        ("the same, level -3", OURS, backup("b", &quick, "measured", 0)),
                        ("qemu-img convert", OTHER, backup("b", &quick, "beside", 0)),
                        ("borg", OTHER, backup("b", &borg, "beside", 0)),
                        ("restic", OTHER, backup("b", &restic, "beside", 0)),
                    ],
                ),
                bars_of(
                    "Tuples a second",
                    "M",
                    [
                        ("the driver's socket", OURS, stream("table", "e", socket, "measured", 0)),
                        ("bare", BARE, stream("table", "e", socket, "beside", 0)),
                        ("the gateway, TLS", OURS, stream("gateway", "a", tls, "measured", 0)),
                        ("community's sidecar", OTHER, stream("gateway", "a", tls, "beside", 1)),
                        ("bare", BARE, stream("gateway", "a", tls, "beside", 0)),
                        ("router, mutual TLS", OURS, stream("router", "b", mutual, "measured", 0)),
                        ("bare", BARE, stream("router", "b", mutual, "beside", 0)),
                    ],
                ),
                bars_of(
                    "Noise, and 1 % of it changed",
                    "s",
                    [
                        ("full backup", OURS, backup("a", noise, "measured", 0)),
                        ("bare", BARE, backup("a", noise, "beside", 0)),
                        ("restore", OURS, backup("d", restore, "measured", 0)),
                        ("bare", BARE, backup("d", restore, "beside", 0)),
                        ("incremental, 1 %", OURS, backup("c", one, "measured", 0)),
                        ("bare", BARE, backup("c", one, "beside", 0)),
                    ],
                ),
            ],
        ),
    ]
}

fn bars_of(
    title: &'static str,
    unit: &'static str,
    bars: impl IntoIterator<Item = (&'static str, usize, Option<f64>)>,
) -> Panel {
    Panel::Bars {
        title,
        unit,
        bars: bars.into_iter().map(|(name, of, figure)| (name, of, figure.expect(name))).collect(),
    }
}

#[test]
fn the_charts_are_drawn_from_the_figures() {
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let read =
        |name: &str| std::fs::read_to_string(docs.join(name)).unwrap_or_else(|_| panic!("no docs/{name}"));
    let rows = Rows(serde_json::from_str(&read("benchmarks.json")).expect("JSON"));
    let page = read("benchmarks.md");
    for (name, svg) in charts(&rows) {
        let name = format!("charts/{name}.svg");
        if std::env::var_os("DELTAPATH_CHARTS").is_some() {
            std::fs::write(docs.join(&name), &svg).expect("write");
        }
        assert!(
            read(&name) == svg,
            "docs/{name} is not drawn from docs/benchmarks.json: `make charts` draws it"
        );
        assert!(page.contains(&name), "docs/benchmarks.md does not show {name}");
    }
}
