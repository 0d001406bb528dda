//! Results as one page of HTML: charts as inline SVG and a table, with no script and nothing from elsewhere. Narrow and wide, light
//! and dark.

use std::collections::BTreeSet;
use std::fmt::Write;

use base::Quantity;

use super::figures::{Figure, Outcome, Spot, Spread, Unit, Verdict, Why, spots};
use super::show::{heading, letter, warnings};

/// Width of a chart in units of its own; it is scaled to its column.
const WIDTH: f64 = 340.0;
/// Colours of results; further ones begin again, and differ by their letter.
const COLOURS: usize = 6;

const STYLE: &str = "
:root { color-scheme: light dark; --paper: #fcfcfb; --card: #ffffff; --ink: #1c1c1a; --soft: #5c5b57; --line: #dedcd6; --bad: #b3261e;
  --c0: #2a6fdb; --c1: #c2570c; --c2: #14855f; --c3: #8a4fc7; --c4: #b0357a; --c5: #6b6a1f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #161615; --card: #1f1f1d; --ink: #eceae4; --soft: #a9a69e; --line: #3a3935; --bad: #ff8a80;
    --c0: #6aa5ff; --c1: #f2934a; --c2: #4fc79b; --c3: #c09af0; --c4: #f083b8; --c5: #c9c65a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .75rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; }
h3 { font-size: .9rem; margin: 0 0 .5rem; font-weight: 600; }
p { margin: .25rem 0 .75rem; color: var(--soft); max-width: 60rem; }
ul.results { list-style: none; margin: 0; padding: 0; } ul.results > li { margin: .4rem 0; overflow-wrap: anywhere; }
.mark { display: inline-block; min-width: 1.4em; padding: 0 .3em; margin-right: .4em; border-radius: .25em; text-align: center;
  font-weight: 700; color: var(--card); }
.bad { color: var(--bad); font-weight: 600; }
.warnings { margin: .2rem 0 0 2rem; padding: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: .75rem; }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
svg { display: block; width: 100%; max-width: 30rem; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg text.soft { fill: var(--soft); } svg text.bad { fill: var(--bad); }
.grid { stroke: var(--line); } .spread { stroke: var(--ink); stroke-width: 1.5; }
.bare { fill: none; stroke: var(--soft); stroke-dasharray: 3 2; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-top: 1px solid var(--line); text-align: right; white-space: nowrap; vertical-align: top; }
thead th { border-top: 0; } th:first-child, td:first-child { text-align: left; }
th[scope=row] { font-weight: 400; } tr.place th { text-align: left; font-weight: 700; background: var(--paper); }
td.why { white-space: normal; text-align: left; min-width: 14rem; } small { color: var(--soft); }
";

/// Text between tags, and in attributes.
fn safe(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn colour(at: usize) -> String {
    format!("var(--c{})", at % COLOURS)
}

/// The whole page.
pub(super) fn page(results: &[Outcome]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for result in results {
        if !names.contains(&result.driver.as_str()) {
            names.push(&result.driver);
        }
    }
    let title = safe(&format!("What snapshots cost: {}", names.join(", ")));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>{title}</h1>\n"
    );
    list(results, &mut out);
    let all = spots(results);
    let of = |belongs: fn(&Spot) -> bool| -> Vec<&Spot> {
        all.iter().copied().filter(|spot| spot.snapshots.is_none() && belongs(spot)).collect()
    };
    let calls = of(|spot| spot.unit == Unit::Milliseconds && !spot.id.starts_with("pause-"));
    section(
        "Calls",
        "Shorter is better. Bar: the median of all runs; line over it: from the least to the most; dashed: the bare operation.",
        &charts(&calls, results),
        &mut out,
    );
    let sizes: BTreeSet<u64> = calls.iter().map(|spot| spot.size).collect();
    if sizes.len() > 1 {
        let drawn = growth(&calls, results, |spot| (spot.size, Quantity(spot.size).to_string()));
        section(
            "As the volume grows",
            "Both scales are logarithmic: a flat line does not depend on the size.",
            &drawn,
            &mut out,
        );
    }
    let many: Vec<&Spot> = all.iter().copied().filter(|spot| spot.snapshots.is_some()).collect();
    let counts: BTreeSet<Option<u64>> = many.iter().map(|spot| spot.snapshots).collect();
    let note = "Snapshots that the volume has before. Both scales are logarithmic: a flat line does not depend on their number.";
    let drawn = match counts.len() > 1 {
        true => growth(&many, results, |spot| {
            let count = spot.snapshots.unwrap_or(0);
            (count, count.to_string())
        }),
        false => charts(&many, results),
    };
    section("As snapshots add up", note, &drawn, &mut out);
    let writes = of(|spot| spot.id.starts_with("write-") || spot.id.starts_with("pause-"));
    section(
        "Random writes",
        "4 KiB each, in batches of 64 that are flushed. Of writes a second more is better, of waits less.",
        &charts(&writes, results),
        &mut out,
    );
    let space = of(|spot| spot.id.starts_with("space-") || spot.id.starts_with("listed-"));
    section(
        "Space and lists",
        "By what GetCapacity says is left. What a delta lists for each byte that changed is 1 at best.",
        &charts(&space, results),
        &mut out,
    );
    table(&all, results, &mut out);
    let _ = writeln!(out, "<p>Made by cbt-lab bench {}.</p>\n</body>\n</html>", env!("CARGO_PKG_VERSION"));
    out
}

fn list(results: &[Outcome], out: &mut String) {
    out.push_str("<ul class=\"results\">\n");
    for (at, result) in results.iter().enumerate() {
        let (colour, letter, heading) = (colour(at), letter(at), safe(&heading(result)));
        let _ =
            write!(out, "<li><span class=\"mark\" style=\"background: {colour}\">{letter}</span>{heading}");
        let warnings = warnings(result);
        if !warnings.is_empty() {
            let bad = if result.verdict == Verdict::Right { "" } else { " bad" };
            let _ = write!(out, "<ul class=\"warnings{bad}\">");
            for warning in warnings {
                let _ = write!(out, "<li>{}</li>", safe(&warning));
            }
            out.push_str("</ul>");
        }
        out.push_str("</li>\n");
    }
    out.push_str("</ul>\n");
}

fn section(title: &str, note: &str, charts: &str, out: &mut String) {
    if !charts.is_empty() {
        let _ = writeln!(out, "<h2>{title}</h2>\n<p>{note}</p>\n<div class=\"charts\">\n{charts}</div>");
    }
}

/// Spots by their id, each with all sizes or counts.
fn by_id<'s>(spots: &[&'s Spot]) -> Vec<Vec<&'s Spot>> {
    let mut groups: Vec<Vec<&Spot>> = Vec::new();
    for spot in spots {
        match groups.iter_mut().find(|group| group[0].id == spot.id) {
            Some(group) => group.push(spot),
            None => groups.push(vec![spot]),
        }
    }
    groups
}

/// A chart a figure, with a bar for each size and result.
fn charts(spots: &[&Spot], results: &[Outcome]) -> String {
    let mut out = String::new();
    for group in by_id(spots) {
        let rows: Vec<(&Spot, usize, &Figure)> = group
            .iter()
            .flat_map(|spot| {
                results.iter().enumerate().filter_map(|(at, result)| Some((*spot, at, result.find(spot)?)))
            })
            .collect();
        let numbers = rows.iter().flat_map(|(_, _, figure)| {
            let bare = figure.bare.as_ref().map_or(0.0, |bare| bare.measured.median);
            [figure.measured.as_ref().map_or(0.0, |measured| measured.max), bare]
        });
        let most = numbers.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let x = |number: f64| (number.max(0.0) / most * WIDTH).clamp(0.0, WIDTH);
        let (mut drawn, mut y) = (String::new(), 0.0);
        for (spot, at, figure) in rows {
            let name = match results.len() {
                1 => spot.place(),
                _ => format!("{} {}", letter(at), spot.place()),
            };
            let (value, class) = match (&figure.measured, &figure.missing) {
                (Some(measured), _) => (spot.unit.spread(measured), ""),
                (None, Some(missing)) => {
                    let text = missing.to_string();
                    let class = match missing.kind {
                        Why::LeftOut => " class=\"soft\"",
                        Why::Wrong | Why::Failed => " class=\"bad\"",
                    };
                    (text.split(':').next().unwrap_or_default().to_owned(), class)
                }
                (None, None) => ("not measured".to_owned(), " class=\"soft\""),
            };
            let (name, value, line) = (safe(&name), safe(&value), y + 12.0);
            let _ = write!(
                drawn,
                "<text x=\"0\" y=\"{line:.0}\" class=\"soft\">{name}</text><text x=\"{WIDTH}\" y=\"{line:.0}\" text-anchor=\"end\"{class}>{value}</text>"
            );
            if let Some(measured) = &figure.measured {
                let (top, middle, colour) = (y + 17.0, y + 22.0, colour(at));
                let [median, min, max] = [measured.median, measured.min, measured.max].map(x);
                let width = median.max(1.0);
                let _ = write!(
                    drawn,
                    "<rect x=\"0\" y=\"{top:.0}\" width=\"{width:.1}\" height=\"10\" rx=\"2\" fill=\"{colour}\"/><line class=\"spread\" x1=\"{min:.1}\" x2=\"{max:.1}\" y1=\"{middle:.0}\" y2=\"{middle:.0}\"/>"
                );
            }
            y += 30.0;
            if let Some(bare) = &figure.bare {
                let text = safe(&format!("bare, {}: {}", bare.what, spot.unit.spread(&bare.measured)));
                let (top, width) = (y - 1.5, (x(bare.measured.median) - 1.0).max(1.0));
                let _ = write!(
                    drawn,
                    "<rect class=\"bare\" x=\".5\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"5\"><title>{text}</title></rect>"
                );
                y += 9.0;
            }
            y += 4.0;
        }
        out += &drawing(group[0], y, &drawn);
    }
    out
}

fn drawing(spot: &Spot, height: f64, drawn: &str) -> String {
    let what = safe(&spot.what);
    format!(
        "<figure><h3>{what}</h3><svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{what}\">{drawn}</svg></figure>\n"
    )
}

/// Points that belong to one result: place on the axis, and spread.
type Line = Vec<(u64, Spread)>;

/// A chart a figure, with a line for each result, over what `axis` says of a spot.
fn growth(spots: &[&Spot], results: &[Outcome], axis: impl Fn(&Spot) -> (u64, String)) -> String {
    let mut out = String::new();
    for group in by_id(spots) {
        let lines: Vec<(usize, Line)> = results
            .iter()
            .enumerate()
            .map(|(at, result)| {
                let point = |spot: &&Spot| Some((axis(spot).0, result.find(spot)?.measured.clone()?));
                (at, group.iter().filter_map(point).collect::<Line>())
            })
            .filter(|(_, line)| !line.is_empty())
            .collect();
        let marks: Vec<(u64, String)> = group.iter().map(|spot| axis(spot)).collect();
        if let Some(drawn) = log_log(&lines, &marks, group[0].unit, results.len() > 1) {
            out += &drawing(group[0], 210.0, &drawn);
        }
    }
    out
}

fn log_log(lines: &[(usize, Line)], marks: &[(u64, String)], unit: Unit, letters: bool) -> Option<String> {
    const LEFT: f64 = 56.0;
    const RIGHT: f64 = WIDTH - 24.0;
    const TOP: f64 = 8.0;
    const BOTTOM: f64 = 182.0;
    let log = |number: f64| number.max(1e-3).log10();
    let spreads = || lines.iter().flat_map(|(_, line)| line.iter().map(|(_, spread)| spread));
    let low = spreads().map(|spread| log(spread.min)).reduce(f64::min)?.floor();
    let high = spreads().map(|spread| log(spread.max)).reduce(f64::max)?.ceil().max(low + 1.0);
    let first = marks.iter().map(|(place, _)| log(*place as f64)).reduce(f64::min)?;
    let last = marks.iter().map(|(place, _)| log(*place as f64)).reduce(f64::max)?;
    let x = |place: u64| LEFT + (log(place as f64) - first) / (last - first).max(1e-9) * (RIGHT - LEFT);
    let y = |number: f64| BOTTOM - (log(number) - low) / (high - low) * (BOTTOM - TOP);
    let mut drawn = String::new();
    for decade in low as i32..=high as i32 {
        let number = 10_f64.powi(decade);
        let label = match (unit, number) {
            (Unit::Milliseconds, number) if number >= 1000.0 => format!("{} s", number / 1000.0),
            (Unit::Milliseconds, number) => format!("{number} ms"),
            (unit, number) => unit.text(number),
        };
        let (label, at, left) = (safe(&label), y(number), LEFT - 8.0);
        let line = at + 4.0;
        let _ = write!(
            drawn,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text class=\"soft\" x=\"{left:.0}\" y=\"{line:.1}\" text-anchor=\"end\">{label}</text>"
        );
    }
    let mut written = f64::MIN;
    for (place, label) in marks {
        // Labels that would run into each other are left out.
        let (at, label) = (x(*place), safe(label));
        if at - written >= 30.0 {
            written = at;
            let _ = write!(
                drawn,
                "<text class=\"soft\" x=\"{at:.1}\" y=\"202\" text-anchor=\"middle\">{label}</text>"
            );
        }
    }
    for (at, line) in lines {
        let (colour, name) = (colour(*at), letter(*at));
        let points: Vec<String> =
            line.iter().map(|(place, spread)| format!("{:.1},{:.1}", x(*place), y(spread.median))).collect();
        let points = points.join(" ");
        let _ = write!(
            drawn,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{points}\"/>"
        );
        for (place, spread) in line {
            let label = marks.iter().find(|(mark, _)| mark == place).map_or("", |(_, label)| label);
            let text = safe(&format!("{name}, {label}: {}", unit.spread(spread)));
            let (x, [min, max, median]) = (x(*place), [spread.min, spread.max, spread.median].map(y));
            let _ = write!(
                drawn,
                "<line class=\"spread\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{min:.1}\" y2=\"{max:.1}\"/><circle cx=\"{x:.1}\" cy=\"{median:.1}\" r=\"4\" fill=\"{colour}\"><title>{text}</title></circle>"
            );
        }
        if let Some((place, spread)) = line.last().filter(|_| letters) {
            let (right, line) = (x(*place) + 8.0, y(spread.median) + 4.0);
            let _ = write!(drawn, "<text x=\"{right:.1}\" y=\"{line:.1}\">{name}</text>");
        }
    }
    Some(drawn)
}

fn table(all: &[&Spot], results: &[Outcome], out: &mut String) {
    let several = results.len() > 1;
    out.push_str("<h2>All figures</h2>\n<p>The median of all runs, and from the least to the most. <i>Bare</i> is the operation without a driver, and how many times it the driver takes.</p>\n<div class=\"scroll\"><table>\n<thead><tr><th scope=\"col\">Figure</th>");
    for at in 0..results.len() {
        let name = if several { format!("{} ", letter(at)) } else { String::new() };
        let _ = write!(
            out,
            "<th scope=\"col\">{name}median</th><th scope=\"col\">spread</th><th scope=\"col\">bare</th>"
        );
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    let mut place = String::new();
    for spot in all {
        if place != spot.place() {
            place = spot.place();
            let (columns, name) = (1 + 3 * results.len(), safe(&place));
            let _ = writeln!(out, "<tr class=\"place\"><th colspan=\"{columns}\">{name}</th></tr>");
        }
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>", safe(&spot.what));
        for result in results {
            cells(spot, result.find(spot), out);
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

fn cells(spot: &Spot, figure: Option<&Figure>, out: &mut String) {
    let Some(figure) = figure else {
        out.push_str("<td></td><td></td><td></td>");
        return;
    };
    let text = |number| safe(&spot.unit.text(number));
    match (&figure.measured, &figure.missing) {
        (Some(measured), _) => {
            let [median, min, max] = [measured.median, measured.min, measured.max].map(text);
            let _ = write!(out, "<td>{median}</td><td><small>{min} to {max}</small></td>");
        }
        (None, missing) => {
            let why = missing.as_ref().map_or("not measured".to_owned(), ToString::to_string);
            let _ = write!(out, "<td colspan=\"2\" class=\"why\">{}</td>", safe(&why));
        }
    }
    let bare = figure.bare.as_ref().map_or(String::new(), |bare| {
        let times =
            figure.times_bare().map_or(String::new(), |times| format!(" <small>{times:.2} x</small>"));
        format!("<span title=\"{}\">{}</span>{times}", safe(&bare.what), text(bare.measured.median))
    });
    let _ = write!(out, "<td>{bare}</td>");
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::result;
    use super::*;

    /// What a driver calls itself cannot become part of the page.
    #[test]
    fn names_are_text() {
        let text = page(&[result("<script>alert('x')</script>&\"", true)]);
        assert!(
            !text.contains("<script")
                && text.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;")
        );
        assert!(text.contains("4096 bytes, &quot;changed&quot;"));
    }

    /// Nothing is fetched and nothing runs.
    #[test]
    fn the_page_stands_alone() {
        let text = page(&[result("a", false), result("b", true)]);
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
            assert!(!text.contains(outside), "{outside}");
        }
        for tag in ["svg", "figure", "table", "div", "ul", "li", "tr", "html", "body", "text"] {
            let opened: usize =
                [" ", ">"].map(|end| text.matches(&format!("<{tag}{end}")).count()).iter().sum();
            let closed = text.matches(&format!("</{tag}>")).count();
            assert!(opened == closed && opened > 0, "{tag}: {opened} opened, {closed} closed");
        }
        assert!(!text.contains("NaN") && !text.contains("inf\""), "a number that is none");
    }

    #[test]
    fn a_wrong_figure_is_drawn_nowhere() {
        let bars = |wrong| {
            let results = [result("a", wrong)];
            let spots = spots(&results);
            let delta: Vec<&Spot> = spots.into_iter().filter(|spot| spot.id == "delta").collect();
            charts(&delta, &results)
        };
        assert!(bars(false).contains("<rect") && bars(false).contains("2.0 ms (1.0 ms to 3.0 ms)"));
        assert!(
            !bars(true).contains("<rect") && bars(true).contains("class=\"bad\">wrong answer, no figure<")
        );
    }

    #[test]
    fn growth_is_drawn_where_there_is_any() {
        let text = page(&[result("a", false), result("b", false)]);
        assert!(text.contains("As the volume grows") && text.contains("As snapshots add up"));
        assert_eq!(
            text.matches("<polyline").count(),
            2 * 3,
            "a line a result: snapshot and delta by size, one by count"
        );
        assert!(text.contains("A, 100: 200 ms (100 ms to 300 ms)"));
    }
}
