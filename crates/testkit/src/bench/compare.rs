//! What got worse: the rows of a run, held against the same rows of docs/benchmarks.json.
//!
//! Times of two machines cannot be compared. Ratios to a bare operation of the same run can, and so can the memory and the
//! open files of a program, and whether a row holds.

use std::fmt::Write;

use serde_json::Value;

use super::Row;

/// By how much a figure may differ from run to run.
const WORSE: f64 = 1.25;
/// And memory in MiB, and open files: a few more do not matter.
const MORE: f64 = 4.0;

/// A figure that says the same on every machine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Figure {
    /// Times as long as something bare.
    Cost(f64),
    /// Percent as quick.
    Speed(f64),
    Memory(f64),
    Files(f64),
}

impl Figure {
    fn of(value: f64, unit: &str) -> Option<Self> {
        match unit.trim_end_matches([',', ';', '.', ')']) {
            "x" => Some(Figure::Cost(value)),
            "%" => Some(Figure::Speed(value)),
            "MiB" => Some(Figure::Memory(value)),
            "open" => Some(Figure::Files(value)),
            _ => None,
        }
    }

    /// All in a cell of the table, in order.
    fn all(cell: &str) -> impl Iterator<Item = Self> {
        let words: Vec<&str> = cell.split_whitespace().collect();
        let figure = |pair: &[&str]| Figure::of(pair[0].trim_start_matches('(').parse().ok()?, pair[1]);
        words.windows(2).filter_map(figure).collect::<Vec<_>>().into_iter()
    }

    /// Those that are compared: of what was measured the memory and the files, and all ratios to what it is compared with.
    fn compared(measured: &str, beside: &str) -> Vec<Self> {
        let is_ratio = |figure: &Self| matches!(figure, Figure::Cost(_) | Figure::Speed(_));
        let own = Figure::all(measured).filter(|figure| !is_ratio(figure));
        own.chain(Figure::all(beside).filter(is_ratio)).collect()
    }

    /// `None` where they are of two kinds.
    fn is_worse_than(self, old: Self) -> Option<bool> {
        match (self, old) {
            (Figure::Cost(new), Figure::Cost(old)) => Some(new > old * WORSE),
            (Figure::Speed(new), Figure::Speed(old)) => Some(new * WORSE < old),
            (Figure::Memory(new), Figure::Memory(old)) | (Figure::Files(new), Figure::Files(old)) => {
                Some(new > old * WORSE && new > old + MORE)
            }
            _ => None,
        }
    }
}

impl std::fmt::Display for Figure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Figure::Cost(value) => write!(f, "{value} x"),
            Figure::Speed(value) => write!(f, "{value} %"),
            Figure::Memory(value) => write!(f, "{value} MiB"),
            Figure::Files(value) => write!(f, "{value} open files"),
        }
    }
}

/// A row that was measured earlier.
struct Known {
    figures: Vec<Figure>,
    holds: bool,
}

impl Known {
    /// The row of the same id that says the same of what it measures.
    fn find(row: &Row, earlier: &[Value]) -> Option<Self> {
        let known =
            earlier.iter().find(|known| known["id"] == row.id && known["what"] == row.what.as_str())?;
        let figures = Figure::compared(known["measured"].as_str()?, known["beside"].as_str()?);
        Some(Known { figures, holds: known["holds"].as_bool()? })
    }
}

/// Which rows are worse than earlier ones, and which cannot be compared with them.
pub fn report(rows: &[Row], earlier: &[Value], name: &str) -> String {
    let (mut rows_known, mut figures) = (0, 0);
    let (mut worse, mut unknown, mut other) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let title = format!("{} {}", row.id, row.what);
        let Some(known) = Known::find(row, earlier) else {
            unknown.push(title);
            continue;
        };
        rows_known += 1;
        if known.holds && !row.holds {
            worse.push(format!("{title}: {}, and did hold", super::verdict(false)));
        }
        let now = Figure::compared(&row.measured, &row.beside);
        let verdicts = now.iter().zip(&known.figures).map(|(new, old)| new.is_worse_than(*old));
        match verdicts.collect::<Option<Vec<_>>>() {
            Some(verdicts) if now.len() == known.figures.len() => {
                figures += now.len();
                for ((new, old), _) in
                    now.iter().zip(&known.figures).zip(verdicts).filter(|(_, is_worse)| *is_worse)
                {
                    worse.push(format!("{title}: {new} was {old}"));
                }
            }
            _ => other.push(title),
        }
    }
    let mut text = format!("{rows_known} of {} rows and {figures} figures compared with {name}.", rows.len());
    for (what, rows) in [
        ("Worse by more than a quarter, or no longer held", worse),
        ("Not there", unknown),
        ("With other figures there", other),
    ] {
        match rows.as_slice() {
            [] => write!(text, "\n{what}: none."),
            some => write!(text, "\n{what}:\n- {}", some.join("\n- ")),
        }
        .expect("a string takes all");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_figures_of_a_row_are_found_whatever_follows_them() {
        use Figure::{Cost, Files, Memory, Speed};
        for (measured, beside, figures) in [
            (
                "3.1 ms (2.9 ms to 4 ms)",
                "of 100: 1.04 x, 8.82 x; bare copies 2.5 x.",
                vec![Cost(1.04), Cost(8.82), Cost(2.5)],
            ),
            (
                "76067/s",
                "100 % of loops, 76006/s; 68 % of files (1.5 x)",
                vec![Speed(100.0), Speed(68.0), Cost(1.5)],
            ),
            (
                "1196 ms, then 18 MiB when idle, 16 open files",
                "12 MiB, 15 open files",
                vec![Memory(18.0), Files(16.0)],
            ),
            ("96 % after 44 s", "36 ms", vec![]),
        ] {
            assert_eq!(Figure::compared(measured, beside), figures, "{measured} | {beside}");
        }
    }

    #[test]
    fn what_is_worse_is_told_and_so_is_what_cannot_be_compared() {
        let row = |what: &str, measured: &str, beside: &str, holds| Row {
            id: "a",
            what: what.to_owned(),
            measured: measured.to_owned(),
            beside: beside.to_owned(),
            must: "2 x",
            holds,
        };
        let old = [
            row("second ratio", "1 ms", "1.0 x the bare; 80 % of it", true),
            row("within a quarter", "1 ms", "1.0 x, 100 %", true),
            row("no longer held", "1 ms", "1.9 x", true),
            row("missed as before", "1 ms", "2.1 x", false),
            row("memory", "1 ms, 20 MiB", "1.0 x", true),
            row("little memory", "1 ms, 2 MiB", "1.0 x", true),
            row("one figure more", "1 ms", "1.0 x", true),
            row("another kind", "1 ms", "1.0 x", true),
        ];
        let json = |row: &Row| {
            let Row { id, what, measured, beside, must, holds } = row;
            serde_json::json!({ "id": id, "what": what, "measured": measured, "beside": beside, "must": must, "holds": holds })
        };
        let earlier: Vec<Value> = old.iter().map(json).collect();
        let new = [
            row("second ratio", "9 ms", "1.2 x the bare; 63 % of it", true),
            row("within a quarter", "1 ms", "1.25 x, 81 %", true),
            row("no longer held", "1 ms", "2.05 x", false),
            row("missed as before", "1 ms", "2.2 x", false),
            row("memory", "1 ms, 26 MiB", "1.0 x", true),
            row("little memory", "1 ms, 5 MiB", "1.0 x", true),
            row("one figure more", "1 ms", "1.0 x, 1.0 x", true),
            row("another kind", "1 ms", "100 %", true),
            row("new", "1 ms", "1.0 x", true),
        ];
        let expected = "8 of 9 rows and 10 figures compared with the file.\n\
            Worse by more than a quarter, or no longer held:\n\
            - a second ratio: 63 % was 80 %\n\
            - a no longer held: MISSED, and did hold\n\
            - a memory: 26 MiB was 20 MiB\n\
            Not there:\n- a new\n\
            With other figures there:\n- a one figure more\n- a another kind";
        assert_eq!(report(&new, &earlier, "the file"), expected);
        let same = report(&old, &earlier, "the file");
        assert!(same.contains("held: none.\nNot there: none.\nWith other figures there: none."), "{same}");
    }
}
