//! Results as text, and as CSV.

use std::fmt::Write;

use base::Quantity;

use super::figures::{Figure, Outcome, Spot, Spread, Verdict, spots};

/// The name of a result among several: A, B and so on.
pub(super) fn letter(at: usize) -> String {
    match u8::try_from(at).ok().filter(|at| *at < 26) {
        Some(at) => char::from(b'A' + at).to_string(),
        None => format!("#{}", at + 1),
    }
}

/// What was measured, where and how, in a line.
pub(super) fn heading(result: &Outcome) -> String {
    let Outcome { driver, version, conditions, .. } = result;
    let label = result.label.as_ref().map_or(String::new(), |label| format!("{label}: "));
    let [before, after] = conditions.load;
    let parameters = match conditions.parameters.is_empty() {
        true => String::new(),
        false => format!(" ({})", conditions.parameters.join(", ")),
    };
    let runs = match conditions.runs {
        1 => "1 run".to_owned(),
        runs => format!("{runs} runs"),
    };
    format!(
        "{label}{driver} {version}{parameters}, {}, {} CPUs, Linux {}, load {before:.1} to {after:.1}; {} of data, {} in {:.0} s",
        conditions.when,
        conditions.cpus,
        conditions.kernel,
        Quantity(conditions.data),
        runs,
        conditions.seconds
    )
}

/// What a user has to know of a result in addition to its figures.
pub(super) fn warnings(result: &Outcome) -> Vec<String> {
    let mut text = Vec::new();
    match result.verdict {
        Verdict::Right => {}
        Verdict::Wrong => text
            .push("WRONG: the driver's answers are not what was written; these figures are not given".into()),
        Verdict::Failed => text.push("FAILED: not all could be measured".to_owned()),
        Verdict::Interrupted => text.push("INTERRUPTED: what was measured until then".to_owned()),
    }
    text.extend(result.troubles.iter().cloned());
    text.extend(result.left_behind.iter().map(|left| format!("left behind: {left}")));
    let busiest = result.conditions.load.into_iter().fold(0.0, f64::max);
    if busiest > result.conditions.cpus as f64 + 1.0 {
        let cpus = result.conditions.cpus;
        text.push(format!("the machine was busy: up to {busiest:.1} programs wanted its {cpus} CPUs"));
    }
    text
}

/// For a person: one result with its spread, or several side by side.
pub(super) fn text(results: &[Outcome]) -> String {
    let mut out = String::new();
    for (at, result) in results.iter().enumerate() {
        let name = if results.len() > 1 { format!("{}: ", letter(at)) } else { String::new() };
        let _ = writeln!(out, "{name}{}", heading(result));
        for warning in warnings(result) {
            let _ = writeln!(out, "   {warning}");
        }
    }
    let mut place = String::new();
    for spot in spots(results) {
        if place != spot.place() {
            place = spot.place();
            let _ = write!(out, "\n{place:<54}");
            let names: String = match results {
                [_] => ["median", "min", "max", "bare"].map(|name| format!("{name:>12}")).join(" "),
                _ => (0..results.len()).map(|at| format!("{:<36}", letter(at))).collect(),
            };
            let _ = writeln!(out, "{}", names.trim_end());
        }
        let line = match results {
            [result] => alone(spot, result),
            _ => {
                let cells: String =
                    results.iter().map(|result| format!("{:<36}", cell(spot, result))).collect();
                format!("  {:<52}{cells}", spot.what)
            }
        };
        let _ = writeln!(out, "{}", line.trim_end());
    }
    if results.len() == 1 {
        bare_operations(results, &mut out);
    }
    out
}

fn alone(spot: &Spot, result: &Outcome) -> String {
    let Some(figure) = result.find(spot) else { return String::new() };
    let unit = spot.unit;
    let what = &spot.what;
    if let Some(missing) = &figure.missing {
        return format!("  {what:<52}{missing}");
    }
    let Some(measured) = &figure.measured else { return format!("  {what:<52}not measured") };
    let numbers =
        [measured.median, measured.min, measured.max].map(|number| format!("{:>12}", unit.text(number)));
    let bare = figure.bare.as_ref().map_or(String::new(), |bare| unit.text(bare.measured.median));
    format!("  {what:<52}{} {bare:>12}", numbers.join(" "))
}

/// Median and spread of one result, or why there is none.
pub(super) fn cell(spot: &Spot, result: &Outcome) -> String {
    match result.find(spot) {
        None => "-".into(),
        Some(Figure { missing: Some(missing), .. }) => {
            let text = missing.to_string();
            text.split(':').next().unwrap_or_default().to_owned()
        }
        Some(Figure { measured: Some(measured), .. }) => spot.unit.spread(measured),
        Some(_) => "-".into(),
    }
}

fn bare_operations(results: &[Outcome], out: &mut String) {
    let mut text: Vec<(&str, &str)> = Vec::new();
    for figure in results.iter().flat_map(|result| &result.figures) {
        if let Some(bare) = &figure.bare
            && !text.contains(&(&figure.spot.what, &bare.what))
        {
            text.push((&figure.spot.what, &bare.what));
        }
    }
    if !text.is_empty() {
        let _ = writeln!(out, "\nbare, in the directory that was given:");
    }
    for (what, bare) in text {
        let _ = writeln!(out, "  {what:<52}{bare}");
    }
}

/// A line a figure, with a heading.
pub(super) fn csv(results: &[Outcome]) -> String {
    let mut out = String::from(
        "driver,version,when,figure,id,size_bytes,snapshots,unit,runs,median,min,max,bare,bare_median,bare_min,bare_max,missing\r\n",
    );
    for result in results {
        for figure in &result.figures {
            let spread = |spread: Option<&Spread>| match spread {
                None => [String::new(), String::new(), String::new()],
                Some(spread) => [spread.median, spread.min, spread.max].map(|number| number.to_string()),
            };
            let unit = serde_json::to_value(figure.spot.unit).ok();
            let runs = figure.measured.as_ref().map_or(0, |measured| measured.samples.len());
            let mut cells = vec![
                result.driver.clone(),
                result.version.clone(),
                result.conditions.when.clone(),
                figure.spot.what.clone(),
                figure.spot.id.clone(),
                figure.spot.size.to_string(),
                figure.spot.snapshots.map(|count| count.to_string()).unwrap_or_default(),
                unit.as_ref().and_then(|unit| unit.as_str()).unwrap_or_default().to_owned(),
                runs.to_string(),
            ];
            cells.extend(spread(figure.measured.as_ref()));
            cells.push(figure.bare.as_ref().map(|bare| bare.what.clone()).unwrap_or_default());
            cells.extend(spread(figure.bare.as_ref().map(|bare| &bare.measured)));
            cells.push(figure.missing.as_ref().map(ToString::to_string).unwrap_or_default());
            let line: Vec<String> = cells.iter().map(|cell| quoted(cell)).collect();
            out.push_str(&line.join(","));
            out.push_str("\r\n");
        }
    }
    out
}

/// A cell as RFC 4180 has it.
fn quoted(cell: &str) -> String {
    match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::result;
    use super::*;

    #[test]
    fn a_wrong_figure_has_a_reason_in_every_form() {
        let wrong = result("a.csi", true);
        let text = text(std::slice::from_ref(&wrong));
        assert!(text.contains("WRONG: the driver's answers"), "{text}");
        assert!(text.contains("wrong answer, no figure: 4096 bytes, \"changed\""), "{text}");
        assert!(text.contains("2.0 ms") && text.contains("1.0 ms") && text.contains("3.0 ms"), "{text}");
        let lines = csv(std::slice::from_ref(&wrong));
        let delta = lines.lines().find(|line| line.contains("DELTA")).expect("a line");
        let reason = "\"wrong answer, no figure: 4096 bytes, \"\"changed\"\"\"";
        assert!(delta.ends_with(&format!(",,,,,,{reason}")), "{delta}");
        assert!(delta.contains(",0,"), "no runs count: {delta}");
    }
}
