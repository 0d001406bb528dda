//! Flags, parameters and make targets in the pages exist, and the reference has all of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::commands::PROGRAMS;
use crate::faults::until;
use testkit::files_below;
use testkit::pages::{blocks, quoted, read, rows, section};
use testkit::prelude::*;

/// Programs and commands with a section in the reference.
const SECTIONS: [&str; 9] = [
    "deltapath driver",
    "deltapath-gateway",
    "deltapath-router",
    "deltapath-router certificates",
    "deltapath-router node-certificate",
    "cbt-backup",
    "cbt-earlier differential",
    "cbt-earlier aggregated",
    "cbt-earlier cbt-http",
];

/// Flags in the prose of pages that other programs and scripts have, or that are hidden.
const OF_OTHERS: [&str; 29] = [
    "--all-features",
    "--api-versions",
    "--bench",
    "--chart",
    "--distributed",
    "--enable-distributed-snapshotting",
    "--features",
    "--filename",
    "--force",
    "--help",
    "--kube-api-qps",
    "--long",
    "--make-rshared",
    "--metrics-address",
    "--name",
    "--no-growth",
    "--node-deployment",
    "--nodes",
    "--reset-then-reuse-values",
    "--server-side",
    "--set",
    "--setra",
    "--setro",
    "--show-labels",
    "--snapshot-move-data",
    "--strict-topology",
    "--take-ownership",
    "--version",
    "--workspace",
];

fn help(program: &str, subcommand: &str) -> String {
    let output = Command::new(testkit::program(program)).args([subcommand, "--help"]).output().expect("run");
    assert!(output.status.success());
    String::from_utf8(output.stdout).expect("utf-8")
}

/// The words of a text that begin with `prefix`, each cut at the first character that cannot be in a name.
fn words(text: &str, prefix: &str) -> BTreeSet<String> {
    let name = |rest: &str| -> String {
        rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect()
    };
    let found = text.split(prefix).skip(1).map(|rest| format!("{prefix}{}", name(rest)));
    let begins_with_a_letter =
        |word: &String| word[prefix.len()..].starts_with(|c: char| c.is_ascii_alphabetic());
    found.filter(begins_with_a_letter).collect()
}

/// Whoever adds commands or code to a page says who runs them: its row begins with `all`, or names every program of others that a line
/// of the page begins with. Pictures hold no commands.
#[test]
fn every_page_with_commands_is_in_the_table_of_who_runs_them() {
    let testing = read("docs/testing.md");
    let table = section(&testing, "Commands in the pages");
    let is_ours = |word: &str| {
        let of_ours = PROGRAMS.iter().any(|(name, _)| word == *name) || word == "make";
        of_ours || ["hack/", "target/"].iter().any(|dir| word.starts_with(dir))
    };
    let is_of_the_shell = |word: &str| {
        ["", "for", "do", "done", "export", "source", "#", "END"].contains(&word) || word.contains(['=', ':'])
    };
    for page in crate::cluster_docs::pages() {
        let text = read(&page);
        let mut languages = text.lines().filter_map(|line| line.trim_start().strip_prefix("```"));
        let has_code = languages.any(|language| !["", "text"].contains(&language));
        let row = table.lines().find(|row| row.contains(&format!("`{page}`")));
        assert_eq!(has_code, row.is_some(), "docs/testing.md, of {page}");
        let first_words = |language| {
            let lines = blocks(&text, language).into_iter().flat_map(str::lines);
            lines.map(|line| line.split(' ').next().unwrap_or_default())
        };
        let pictures = first_words("text").chain(first_words(""));
        let commands: Vec<&str> = pictures.filter(|word| is_ours(word) || *word == "kubectl").collect();
        assert!(
            commands.is_empty(),
            "{page}: a block of text with commands, which nothing checks: {commands:?}"
        );
        let Some(row) = row.filter(|row| !row.contains("| all")) else { continue };
        for word in first_words("sh").filter(|word| !is_ours(word) && !is_of_the_shell(word)) {
            assert!(
                row.contains(&format!("`{word}`")),
                "docs/testing.md does not say who runs {word} of {page}"
            );
        }
    }
}

/// How long a page may be that is read in one sitting.
#[test]
fn the_first_pages_are_short() {
    for (page, most) in [
        ("README.md", 120),
        ("ARCHITECTURE.md", 250),
        ("docs/tutorial-first-delta.md", 150),
        ("docs/tutorial-driver.md", 150),
        ("docs/tutorial-cluster.md", 150),
        ("examples/minimal.rs", 300),
    ] {
        let lines = read(page).lines().count();
        assert!(lines <= most, "{page} has {lines} lines, not at most {most}");
    }
}

/// What is missed is said.
#[test]
fn every_limit_that_a_row_misses_is_in_the_table_of_what_is_missed() {
    let page = read("docs/benchmarks.md");
    let table = rows(section(&page, "What is missed"), "| ");
    let all: Vec<serde_json::Value> = serde_json::from_str(&read("docs/benchmarks.json")).expect("JSON");
    for missed in all.iter().filter(|row| row["holds"] == false) {
        let (what, ratios) =
            (missed["what"].as_str().expect("text"), missed["beside"].as_str().expect("text"));
        let about = ["btrfs", "xfs", "restore", "memory"]
            .into_iter()
            .find(|word| what.contains(word))
            .expect("a word");
        let is_it = |row: &Vec<&str>| {
            let measured = figures(row[1]);
            let is_near = |(ratio, _): (f64, i32)| {
                measured.iter().any(|(told, decimals)| is_rounded(ratio, *told, *decimals))
            };
            let itself = missed["measured"].as_str().expect("text");
            row[0].contains(about) && figures(ratios).into_iter().chain(figures(itself)).any(is_near)
        };
        assert!(
            table[1..].iter().any(is_it),
            "docs/benchmarks.md does not say that this is missed: {missed:#}"
        );
    }
}

/// The commands of a page that call our programs, each to its first pipe, redirection or comment.
fn calls(page: &str) -> Vec<String> {
    let blocks = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let commands = blocks.collect::<String>().replace("\\\n", "");
    let of_ours = |line: &str| {
        let line = line.trim_start().trim_start_matches("target/release/");
        let line = line.strip_prefix("source <(").map_or(line, |rest| rest.trim_end_matches(')'));
        let line = if line.starts_with("kubectl exec") { line.rsplit(" -- ").next()? } else { line };
        let end = [" #", " |", " >", " &"].into_iter().filter_map(|end| line.find(end)).min();
        let line = &line[..end.unwrap_or(line.len())];
        let is_ours = |name: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' '));
        (PROGRAMS.iter().any(|(name, _)| is_ours(name)) || is_ours("kubectl cbt")).then(|| line.to_owned())
    };
    commands.lines().filter_map(of_ours).collect()
}

/// A program that does not know a flag, a command or a value names that, and not the one behind it.
#[test]
fn every_command_of_the_pages_is_one_of_its_program() {
    let programs = PROGRAMS.map(|(name, _)| testkit::program(name));
    let programs = programs[0].parent().expect("a directory").display();
    let path = format!("{programs}:{}", std::env::var("PATH").expect("PATH"));
    let mut seen = 0;
    for page in crate::cluster_docs::pages() {
        for call in calls(&read(&page)) {
            let plugin = "kubectl() { shift; cbt-backup \"$@\"; }; work=/work";
            let script = format!("{plugin}\n{call} --no-such-flag");
            let output = Command::new("bash").args(["-euc", &script]).env("PATH", &path).output();
            let told = String::from_utf8(output.expect("bash").stderr).expect("UTF-8");
            assert!(told.contains("unexpected argument '--no-such-flag'"), "{page}: {call}: {told}");
            seen += 1;
        }
    }
    assert!(seen >= 40, "{seen} commands");
}

/// What clap takes where a flag is not given stands in the flag's row.
#[test]
fn every_default_is_in_the_reference() {
    let reference = read("docs/reference.md");
    let of_backup = PROGRAMS[3].1.iter().map(|command| format!("cbt-backup {command}"));
    let mut seen = 0;
    let of_lab = PROGRAMS[5].1.iter().map(|command| format!("cbt-lab {command}"));
    for line in SECTIONS.map(str::to_owned).into_iter().chain(of_backup).chain(of_lab) {
        let (program, command) = line.split_once(' ').unwrap_or((&line, "--help"));
        let table = match (program, command) {
            ("cbt-lab", "bench") => read("docs/lab-bench.md"),
            ("cbt-lab", "conformance") => read("docs/conformance.md"),
            ("cbt-lab", _) => section(&read("docs/faults.md"), "Flags").to_owned(),
            ("cbt-backup", _) => section(&reference, "Flags of `cbt-backup`").to_owned(),
            _ => section(&reference, &format!("Flags of `{line}`")).to_owned(),
        };
        let mut flag = "";
        for told in help(program, command).lines().map(str::trim) {
            if told.starts_with('-') {
                flag = told.split(' ').find(|word| word.starts_with("--")).unwrap_or(flag);
            }
            let default = told.split_once("[default: ").and_then(|(_, rest)| rest.split_once(']'));
            let Some((default, _)) = default else { continue };
            let says = |row: &str| [flag, default].iter().all(|word| row.contains(&format!("`{word}`")));
            assert!(table.lines().any(says), "{line}: no row says that {flag} is {default}");
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen} defaults");
}

/// The numbers of a text, each with how many decimals it has.
fn figures(text: &str) -> Vec<(f64, i32)> {
    let text = text.replace(',', "");
    let words = text.split(|c: char| !c.is_ascii_digit() && c != '.').map(|word| word.trim_matches('.'));
    let decimals = |word: &str| word.split_once('.').map_or(0, |(_, behind)| behind.len() as i32);
    words.filter_map(|word| Some((word.parse::<f64>().ok()?, decimals(word)))).collect()
}

fn is_rounded(number: f64, figure: f64, decimals: i32) -> bool {
    (number - figure).abs() <= 0.5 * 0.1f64.powi(decimals) + 1e-9
}

/// The main figures of the pages are those of the rows, rounded.
#[test]
fn the_figures_of_the_pages_are_those_of_the_benchmarks() {
    let all: Vec<serde_json::Value> = serde_json::from_str(&read("docs/benchmarks.json")).expect("JSON");
    let text = |row: &serde_json::Value, key: &str| row[key].as_str().expect("text").to_owned();
    let both = ["README.md", "docs/benchmarks.md"].map(read).concat();
    for (line, of) in [
        ("| the delta of 1 % of 1 GiB", "GetMetadataDelta of 1 % (2621 blocks), xfs"),
        ("| the first snapshot of", "first CreateSnapshot, nothing hashed, 16 TiB sparse, 1 GiB data, btrfs"),
        ("| a stream of 67 million", "stream of 67,108,864 FIXED_LENGTH tuples"),
        ("| hashed, cached", "GetMetadataDelta of 1 % (2621 blocks), "),
        ("| hashed, nothing cached", "GetMetadataDelta of 1 % (2621 blocks), cold"),
        ("| at once, nothing", "GetMetadataDelta at once after CreateSnapshot, cold, 1 %"),
        ("| the same in a sparse volume", "row j in a volume of 16 TiB"),
        ("| GetMetadataDelta | 64 TiB", "64 TiB with 67,108,864 allocated blocks"),
        ("| default compression", "full backup, 4 GiB of data of which half is text, against"),
        ("| `--compression=-3`", "full backup, 4 GiB of data of which half is text, --compression=-3"),
        ("| delta from the first of 1,000 snapshots", "a delta from the first, 1000 snapshots of a volume"),
    ] {
        let line = both.lines().find(|row| row.starts_with(line)).expect(line);
        let rows = all.iter().filter(|row| text(row, "what").starts_with(of));
        let rows = rows.map(|row| ["what", "measured", "beside", "must"].map(|key| text(row, key)).join(" "));
        let measured = figures(&rows.collect::<Vec<_>>().join(" "));
        for (figure, decimals) in figures(line) {
            let is_it = |found: f64| is_rounded(found, figure, decimals);
            let is_there = measured.iter().any(|(found, _)| is_it(*found) || is_it(found / 1e6));
            assert!(is_there, "{line}: {figure} is not in docs/benchmarks.json at {of:?}");
        }
    }
}

#[test]
fn every_flag_is_in_the_reference_and_every_flag_in_the_pages_is_real() {
    let driver = words(&help("deltapath", "driver"), "--");
    let mut real = driver.clone();
    let commands = words(section(&read("docs/reference.md"), "Commands"), "--");
    for command in ["demo", "verify", "check", "preflight", "man"] {
        let flags = words(&help("deltapath", command), "--");
        for flag in flags.iter().filter(|flag| *flag != "--help") {
            assert!(commands.contains(flag), "the reference lacks {flag} of deltapath {command}");
        }
        real.extend(flags);
    }
    for (command, page) in [
        ("bench", "docs/lab-bench.md"),
        ("conformance", "docs/conformance.md"),
        ("faults", "docs/faults.md"),
        ("mock", "docs/faults.md"),
    ] {
        let (flags, named) = (words(&help("cbt-lab", command), "--"), words(&read(page), "--"));
        for flag in flags.iter().filter(|flag| *flag != "--help") {
            assert!(named.contains(flag), "{page} lacks {flag} of cbt-lab {command}");
        }
        real.extend(flags);
    }
    // Other tests compare these sections with the flags of the programs.
    let reference = read("docs/reference.md");
    for title in &SECTIONS[1..] {
        real.extend(words(section(&reference, &format!("Flags of `{title}`")), "--"));
    }
    for page in crate::cluster_docs::pages() {
        // Every second part is a block of code: the programs are asked about those, see above.
        let prose: String = read(&page).split("\n```").step_by(2).collect();
        for flag in words(&prose, "--") {
            let is_known = real.contains(&flag) || OF_OTHERS.contains(&flag.as_str());
            assert!(is_known, "{page} names {flag}, which is not a flag");
        }
    }
    let table: String = reference.lines().filter(|line| line.starts_with("| `--")).collect();
    for flag in driver.iter().filter(|flag| *flag != "--help") {
        assert!(table.contains(&format!("`{flag}`")), "{flag} is not in the table of flags");
    }
}

#[test]
fn every_parameter_in_the_reference_is_accepted() {
    use deltapath::driver::{SnapshotParameters, VolumeParameters, parse_tuning};
    let page = read("docs/reference.md");
    let classes = ["| StorageClass |", "| VolumeSnapshotClass |", "| VolumeAttributesClass |"];
    let of_classes: Vec<Vec<&str>> = classes.iter().flat_map(|class| rows(&page, class)).collect();
    assert_eq!(of_classes.len(), 6);
    // A refusal says which parameters there are.
    let wrong = std::collections::HashMap::from([("no".to_owned(), "x".to_owned())]);
    let refused = [
        VolumeParameters::parse(&wrong).map(drop),
        SnapshotParameters::parse(&wrong).map(drop),
        parse_tuning(&wrong).map(drop),
    ];
    for refused in refused {
        let Err(deltapath::driver::Error::UnknownParameter { known, .. }) = refused else {
            panic!("{refused:?}");
        };
        for name in known.split(", ") {
            assert!(
                of_classes.iter().any(|row| row[1].trim_matches('`') == name),
                "{name} is not in the reference"
            );
        }
    }
    for row in of_classes {
        let name = row[1].trim_matches('`').to_owned();
        let values: Vec<&str> = quoted(row[2]).collect();
        assert!(!values.is_empty(), "{name} has no values");
        for value in values {
            let parameters = std::collections::HashMap::from([(name.clone(), value.to_owned())]);
            match row[0] {
                "VolumeAttributesClass" => drop(parse_tuning(&parameters).expect("a value of the reference")),
                "StorageClass" => {
                    drop(VolumeParameters::parse(&parameters).expect("a value of the reference"))
                }
                _ => drop(SnapshotParameters::parse(&parameters).expect("a value of the reference")),
            }
        }
    }
}

#[test]
fn the_reference_has_the_metrics_of_the_programs_and_no_others() {
    let is_name = |name: &&str| {
        let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
        (name.starts_with("deltapath_") || name.starts_with("cbt_earlier_")) && name.chars().all(is_part)
    };
    let mut code = String::new();
    for dir in ["src", "crates/kit/gateway/src", "crates/kit/router/src", "crates/kit/earlier/src"] {
        for path in files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir), "rs") {
            code.push_str(&std::fs::read_to_string(&path).expect("read"));
        }
    }
    let reference = read("docs/reference.md");
    let real: BTreeSet<&str> = code.split('"').filter(is_name).collect();
    let documented: BTreeSet<&str> = reference.split('`').filter(is_name).collect();
    assert!(real.len() > 40, "{real:?}");
    assert_eq!(real, documented);
}

/// The certificates that docs/router.md makes are those by which a router and a driver know each other.
#[apply(device_test)]
async fn the_certificates_of_the_router_page_are_believed() {
    use testkit::running::Running;
    let mut rig = Rig::start(PoolKind::Dir).await;
    let page = read("docs/router.md");
    let commands = blocks(&page, "sh").into_iter().filter(|block| block.contains("openssl"));
    let script = commands.collect::<Vec<_>>().join("\n");
    let script = script.replace("key=0123abcd", &format!("key={}", rig.key()));
    let dir = testkit::temp_dir();
    testkit::ok(Command::new("bash").args(["-euc", &script]).current_dir(dir.path()));
    let listen = format!("127.0.0.1:{}", testkit::free_port());
    rig.terminate();
    let flags = |prefix: &str, name: &str| {
        [("cert", format!("{name}.crt")), ("key", format!("{name}.key")), ("ca", "ca.crt".into())]
            .map(|(flag, file)| format!("--{prefix}tls-{flag}={}", dir.path().join(file).display()))
    };
    let log = |name: &str| dir.path().join(name);
    let mut driver = testkit::driver_command(rig.dir.path(), PoolKind::Dir);
    driver.args(["--router-listen", &listen]).args(flags("router-", "node"));
    let _driver = Running::start(&mut driver, &log("driver.log"));
    let mut router = Command::new(testkit::program("deltapath-router"));
    router.args(["--node-endpoints", &listen, "--http-endpoint", "127.0.0.1:0"]).args(flags("", "router"));
    router.arg(format!("--endpoint=unix://{}", log("router.sock").display()));
    let router = Running::start(&mut router, &log("router.log"));
    until("the node answers the router", || router.log().contains("a node answers")).await;
}
