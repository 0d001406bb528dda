//! All commands of all programs, towards whoever started them: help, flags, exit codes and messages. How they end is in `ends.rs`.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use testkit::cluster::{Authority, uri};

/// Every program, and the commands that it has.
pub const PROGRAMS: [(&str, &[&str]); 6] = [
    ("deltapath", &["driver", "demo", "verify", "check", "preflight"]),
    ("deltapath-gateway", &[]),
    ("deltapath-router", &["forget", "delete-volume", "certificates", "node-certificate"]),
    (
        "cbt-backup",
        &["full", "incremental", "auto", "run", "restore", "verify", "list", "prune", "show", "mount"],
    ),
    ("cbt-earlier", &["differential", "aggregated", "cbt-http"]),
    ("cbt-lab", &["bench", "conformance", "faults", "mock"]),
];

/// `PROGRAM ARGUMENTS`, each a word; `@` in a word is the directory.
pub fn command(line: &str, dir: &Path) -> Command {
    let mut words = line.split_whitespace();
    let mut command = Command::new(testkit::program(words.next().expect("a program")));
    command.args(words.map(|word| word.replace('@', dir.to_str().expect("UTF-8"))));
    for variable in ["CBT_BACKUP_REPOSITORY", "CSI_ENDPOINT", "POD_NAMESPACE", "RUST_LOG", "KUBECONFIG"] {
        command.env_remove(variable);
    }
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn run(line: &str, dir: &Path) -> Output {
    command(line, dir).output().expect("run")
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What servers and commands need of files: certificates, a kubeconfig for a server that is not there, an image.
pub fn files(dir: &Path) {
    let authority = Authority::new("ca");
    for (name, role) in [("node", "node/0123abcd"), ("router", "router")] {
        authority.issue(dir, name, &uri(role));
    }
    let kubeconfig = "{apiVersion: v1, kind: Config, current-context: c, users: [{name: c, user: {token: t}}], \
                      clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}], \
                      contexts: [{name: c, context: {cluster: c, user: c}}]}";
    std::fs::write(dir.join("kubeconfig"), kubeconfig).expect("write");
    std::fs::write(dir.join("file"), "mine").expect("write");
    std::fs::File::create(dir.join("image")).and_then(|image| image.set_len(1 << 20)).expect("an image");
    std::fs::create_dir(dir.join("dir")).expect("mkdir");
}

/// Flags that a server of Kubernetes needs to start.
pub const SERVES: &str = "--tls-cert @/router.crt --tls-key @/router.key --kubeconfig @/kubeconfig --http-endpoint 127.0.0.1:0 --port 0";
pub const ROUTES: &str =
    "--node-endpoints 127.0.0.1:1 --tls-cert @/router.crt --tls-key @/router.key --tls-ca @/router.ca";

/// The pages' rules for sentences hold in help texts too. The list of commands becomes a list of items.
#[test]
fn help_texts_are_plain_english() {
    let dir = tempfile::tempdir().expect("temp dir");
    for (program, commands) in PROGRAMS {
        for of in ["", "completions", "man"].iter().chain(commands) {
            let help = run(&format!("{program} {of} --help"), dir.path());
            assert!(help.status.success() && !help.stdout.is_empty(), "{program} {of}: {}", said(&help));
            let lines = String::from_utf8(help.stdout).expect("UTF-8");
            let is_item = |line: &&str| line.starts_with("  ") && !line.starts_with("    ");
            let items = lines
                .lines()
                .map(|line| if is_item(&line) { line.replacen("  ", "\n- ", 1) } else { line.into() });
            let page = items.collect::<Vec<_>>().join("\n");
            std::fs::write(dir.path().join(format!("{program}-{of}.md")), page).expect("write");
        }
    }
    let pages = testkit::names(dir.path()).into_iter().map(|name| dir.path().join(name));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/plain-english.sh");
    let output = Command::new(script).arg("--long").args(pages).output().expect("run");
    assert!(output.status.success(), "{}{}", said(&output), String::from_utf8_lossy(&output.stdout));
}

/// The one table of docs/reference.md: 2 is for what is wrong in itself, 1 for what the machine lacks.
#[test_with::root]
#[test]
fn exit_codes_are_the_same_in_all_programs() {
    let dir = testkit::temp_dir();
    let dir = dir.path();
    files(dir);
    let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
    let taken = format!("127.0.0.1:{}", taken.local_addr().expect("an address").port());
    let _socket = UnixListener::bind(dir.join("taken.sock")).expect("bind");
    let driver = "deltapath driver --node-id n --pool dir --data-dir @/driver --endpoint unix://@/csi.sock";
    let router = format!("deltapath-router {ROUTES}");
    let gateway =
        "deltapath-gateway --tls-cert @/router.crt --tls-key @/router.key --kubeconfig @/kubeconfig";
    let earlier = "cbt-earlier cbt-http --service a/b --namespace n --socket @/s --tls-cert @/router.crt \
                   --tls-key @/router.key --kubeconfig @/kubeconfig";
    let faults = "cbt-lab faults --listen unix://@/front.sock --upstream unix://@/csi.sock";
    let mock = "cbt-lab mock --listen unix://@/front.sock";
    let conformance = "cbt-lab conformance --endpoint unix://@/none.sock";
    let full = "cbt-backup --repository @/repository full --volume v --device @/image";
    let mut rows: Vec<(String, i32, &str)> = Vec::new();
    let mut row = |line: &str, code: i32, part: &'static str| rows.push((line.to_owned(), code, part));
    for (program, commands) in PROGRAMS {
        for command in [&[""], commands].concat() {
            row(&format!("{program} {command} --no-such-flag"), 2, "--no-such-flag");
        }
        row(&format!("{program} completions"), 2, "<SHELL>");
        row(&format!("{program} completions tcsh"), 2, "possible values: bash");
        row(&format!("{program} man --out @/file"), 1, "File exists");
        row(&format!("{program} no-such-command"), 2, "no-such-command");
    }
    // Values that are wrong wherever they are given.
    for command in ["list", "verify", "show", "prune", "restore latest --to @/o", "mount latest --socket @/s"]
    {
        row(&format!("cbt-backup {command}"), 2, "no repository is named");
        row(
            &format!("cbt-backup {command} --repository http://a/b"),
            2,
            "write a directory or s3://BUCKET/PREFIX",
        );
    }
    row("cbt-backup full --volume v --device @/image", 2, "no repository is named");
    row("cbt-backup list -n x", 2, "'-n' is a flag of other commands: full, incremental, auto, run\n");
    row(
        "cbt-backup prune --context x",
        2,
        "'--context' is a flag of other commands: full, incremental, auto, run\n",
    );
    // A directory of this machine is none in a pod.
    let pod = "cbt-backup run --patience 1s --kubeconfig @/kubeconfig";
    row(&format!("{pod} --pvc a"), 2, "add --repository s3://BUCKET/PREFIX, or --repository-claim NAME and");
    let needs =
        "run needs a bucket (s3://BUCKET/PREFIX), or --repository-claim NAME for the directory \"backups\"";
    row(&format!("{pod} --pvc a --repository backups"), 2, needs);
    let claimed = format!("{pod} --pvc a --repository-claim c --repository");
    row(&format!("{claimed} s3://b"), 2, "--repository-claim takes a directory in the claim, not s3://b");
    row(&format!("{claimed} ../b"), 2, "--repository-claim takes a directory in the claim, not ../b");
    row(&format!("{pod} --pvc a --repository s3://b --context nope"), 1, "/kubeconfig, --context nope: ");
    row("cbt-backup run --pvc a --repository s3://b --kubeconfig none", 1, "API server: --kubeconfig none: ");
    row("cbt-backup list --repository s3://", 2, "s3://BUCKET/PREFIX");
    row("cbt-backup list --repository s3:///prefix", 2, "s3://BUCKET/PREFIX");
    row("cbt-backup --repository @/repository verify --against @/image", 2, "<BACKUP>");
    row("cbt-backup prune --wait -1", 2, "invalid value '-1'");
    row(&format!("{full} --endpoint csi.sock --snapshot s"), 2, "unix:///");
    row(&format!("{full} --endpoint unix://@/none.sock --snapshot s"), 1, "none.sock");
    row(&format!("{full} --endpoint unix://@/file --snapshot s"), 1, "is not a socket");
    row("cbt-backup show --endpoint unix://@/none.sock --target s", 1, "none.sock");
    row("cbt-backup show --endpoint tcp://1.2.3.4:5 --target s", 2, "unix:///");
    row(&format!("{driver} --overcommit -1"), 2, "must be a number greater than 0");
    row(&format!("{driver} --max-volume-size 0"), 2, "must be above 0");
    row("deltapath driver --node-id a/b --data-dir @/driver", 2, "with a letter or digit at both ends");
    let long = "x".repeat(100);
    row(&format!("deltapath driver --node-id n --endpoint /{long}/csi.sock"), 2, "has at most 107 bytes");
    row(&format!("{driver} --transfer-rate -1"), 2, "invalid value '-1'");
    row(&format!("{driver} --http-endpoint {taken} --pool-size 0"), 2, "must be above 0");
    row(&format!("{driver} --router-listen :1"), 2, "such as 0.0.0.0:9811");
    row("deltapath demo --size 1Mi", 2, "64Mi");
    row("deltapath demo --size -1", 2, "invalid value '-1'");
    row("deltapath demo --size lots", 2, "invalid value 'lots'");
    row("deltapath demo --pool zfs", 2, "invalid value 'zfs'");
    row("deltapath driver", 2, "--node-id");
    row("cbt-lab bench --endpoint unix://@/none.sock --changed -1", 2, "a number above 0");
    row("deltapath-router forget node-1 --forgotten @/forgotten", 2, "node-1");
    row(&format!("{faults} --fault cutt"), 2, "there is cut");
    // These would fail later, for another reason.
    for flag in
        ["namespace", "secret", "service-account", "image", "repository-claim", "snapshot-class", "context"]
    {
        row(&format!("{pod} --repository s3://b --pvc a --{flag}="), 2, "it is empty");
    }
    row(&format!("{pod} --repository s3://b --pvc="), 2, "'--pvc <NAME>': it is empty");
    row(&format!("{router} --http-endpoint {taken} --driver-name="), 2, "it is empty");
    for flag in ["audience", "namespace", "pod-name", "lease"] {
        row(&format!("{gateway} --http-endpoint {taken} --{flag}="), 2, "it is empty");
        row(&format!("{earlier} --http-endpoint {taken} --{flag}="), 2, "it is empty");
    }
    row("cbt-lab mock --listen unix://@/taken.sock --driver-name=", 2, "it is empty");
    row(&format!("{full} --snapshot s --base b"), 2, "'--base'");
    row(&format!("{faults} --fault tls-expired"), 2, "https://");
    row(&format!("{faults} --control nowhere"), 2, "--control");
    row("cbt-lab faults --listen https://127.0.0.1:0 --upstream unix://@/csi.sock", 2, "--ca-file");
    row(&format!("{conformance} --focus no-such-case"), 2, "--list");
    // What is not there, is taken, or does not answer.
    row(&format!("{driver} --http-endpoint {taken}"), 1, "--http-endpoint");
    row(&driver.replace("csi.sock", "taken.sock"), 1, "another process listens");
    row(&driver.replace("csi.sock", "no/dir/csi.sock"), 1, "no/dir");
    row(&format!("{gateway} --http-endpoint {taken}"), 1, "--http-endpoint");
    row(
        "deltapath-gateway --tls-cert @/none --tls-key @/none --http-endpoint 127.0.0.1:0 --port 0",
        1,
        "none",
    );
    row(&format!("{router} --http-endpoint {taken}"), 1, "--http-endpoint");
    row(&format!("{router} --http-endpoint 127.0.0.1:0 --endpoint unix://@/taken.sock"), 1, "taken.sock");
    row("deltapath-router forget 0123abcd --forgotten @/no/dir/f", 1, "no/dir/f");
    row("deltapath-router delete-volume v --endpoint unix://@/none.sock", 1, "none.sock");
    row(&format!("{earlier} --http-endpoint {taken}"), 1, "--http-endpoint");
    row(&faults.replace("front.sock", "taken.sock"), 1, "another process serves");
    row(&faults.replace("unix://@/front.sock", &format!("http://{taken}")), 1, "in use");
    row(&format!("{faults} --control {taken}"), 1, "--control");
    row(&format!("{faults} --faults-file @/none"), 1, "none");
    row(&mock.replace("front.sock", "taken.sock"), 1, "another process serves");
    for command in ["check", "verify", "driver --node-id n --pool dir --endpoint unix://@/csi.sock"] {
        let told = "/file is a file, not a directory: name another --data-dir";
        row(&format!("deltapath {command} --data-dir @/file"), 1, told);
        row(&format!("deltapath {command} --data-dir @/file/data"), 1, told);
    }
    row("deltapath check --data-dir @/none", 1, "none");
    row("deltapath verify --data-dir @/none", 1, "none");
    row("deltapath demo --work-dir @/none", 1, "--work-dir");
    row("cbt-backup list --repository @/none", 1, "the first backup makes it");
    row("cbt-backup list --repository @/dir", 1, "is not a repository");
    row("cbt-backup list --repository @/file", 1, "not a directory");
    row(&full.replace("@/repository", "@/file"), 1, "not a directory");
    row(&full.replace("@/image", "@/none"), 1, "none");
    row("cbt-backup list --repository s3://bucket/prefix", 1, "AWS_ACCESS_KEY_ID");
    // A suite that found nothing out about the driver.
    row(conformance, 2, "no answer at");
    row(&format!("{conformance} --junit /no/such/dir/junit.xml"), 2, "/no/such/dir/junit.xml");
    row("cbt-lab bench --endpoint unix://@/none.sock", 2, "no answer at");
    let mut wrong = Vec::new();
    let page = testkit::pages::read("docs/reference.md");
    let table = testkit::pages::section(&page, "Exit codes");
    // 3 is of `deltapath check`, which tests/suite/check.rs asks.
    for code in [0, 1, 3, i32::from(shell::USAGE), i32::from(shell::INTERRUPTED)] {
        assert!(table.contains(&format!("\n| {code} | ")), "the reference has no exit code {code}");
    }
    for (line, code, part) in rows {
        let began = Instant::now();
        let output = run(&line, dir);
        let (told, took) = (said(&output), began.elapsed());
        let is_right = output.status.code() == Some(code)
            && told.contains(part)
            && output.stdout.is_empty()
            && !told.contains("panicked")
            && took < Duration::from_secs(30);
        if !is_right {
            wrong.push(format!("{line}: {}, not {code} and {part:?}, in {took:?}: {told}", output.status));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    testkit::nothing_left(dir);
}

/// Shells and man pages know every command of every program.
#[test]
fn every_program_has_completions_and_man_pages() {
    let dir = testkit::temp_dir();
    let dir = dir.path();
    let printed = |line: &str| {
        let output = run(line, dir);
        assert!(output.status.success() && output.stderr.is_empty(), "{line}: {}", said(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    // A release is the same on every machine.
    let host = nix::unistd::gethostname().expect("a name").into_string().expect("UTF-8");
    let default = format!("[default: {host}]").replace('-', "\\-");
    let is_of_any_host = |page: &str| assert!(!page.contains(&default), "it names this host: {page}");
    for (program, commands) in PROGRAMS {
        let names = |text: &str, line: &str| {
            for name in [&[program, "--help", "completions", "man"], commands].concat() {
                assert!(text.contains(name), "{line} does not name {name}: {text}");
            }
        };
        for shell in ["bash", "zsh", "fish"] {
            let line = format!("{program} completions {shell}");
            // fish has the dashes of a flag elsewhere.
            names(&printed(&line).replace("-l help", "--help"), &line);
        }
        let line = format!("{program} man");
        let page = printed(&line);
        assert!(page.contains(&format!(".TH {program} 1")), "{line}: {page}");
        names(&page.replace("\\-", "-"), &line);
        assert_eq!(run(&format!("{program} man --out @/man1"), dir).status.code(), Some(0));
        assert_eq!(std::fs::read_to_string(dir.join(format!("man1/{program}.1"))).expect("read"), page);
        is_of_any_host(&page);
        for command in [commands, &["completions", "man"]].concat() {
            let page = std::fs::read_to_string(dir.join(format!("man1/{program}-{command}.1")));
            let page = page.expect("a page for each command");
            is_of_any_host(&page);
            assert!(page.contains(".SH DESCRIPTION"), "{program} {command}: {page}");
        }
    }
}

/// One thing has one name, and is written in one way.
#[test]
fn flags_that_mean_the_same_are_the_same_in_all_programs() {
    let dir = testkit::temp_dir();
    let (mut flags, mut counts) = (0, 0);
    let (mut sockets, mut servers, mut quiet) = (Vec::new(), Vec::new(), Vec::new());
    for (program, commands) in PROGRAMS {
        for command in [&[""], commands].concat() {
            let line = format!("{program} {command}").trim_end().to_owned();
            let help = String::from_utf8(run(&format!("{line} --help"), dir.path()).stdout).expect("UTF-8");
            let has = |flag: &str| {
                let flags = help.lines().filter_map(|line| line.trim_start().strip_prefix("--"));
                flags.map(|rest| rest.split(' ').next()).any(|name| name == Some(flag))
            };
            let is_taken = |flag: &str| {
                let told = said(&run(&format!("{line} {flag} --no-such-flag"), dir.path()));
                assert!(told.contains("unexpected argument '--no-such-flag'"), "{line} {flag}: {told}");
            };
            if has("endpoint") || has("csi-address") {
                sockets.push(line.clone());
                is_taken("--endpoint unix:///csi.sock");
                is_taken("--csi-address unix:///csi.sock");
            }
            assert!(!help.contains("metrics-address"), "{line}: {help}");
            if has("http-endpoint") {
                servers.push(line.clone());
                is_taken("--metrics-address :0");
                is_taken("--http-endpoint 127.0.0.1:0");
            }
            if help.contains(" -q, --quiet\n") {
                quiet.push(line.clone());
            }
            assert!(!help.contains("<SECONDS"), "{line}: {help}");
            for kind in [" <COUNT>", " <NUMBER>", " <NUMBER,...>", " <N>", " <PERCENT>"] {
                // Negative levels of compression are levels.
                let is_count = |flag: &&str| *flag != "--compression";
                for flag in help.lines().filter_map(|line| line.trim().strip_suffix(kind)).filter(is_count) {
                    counts += 1;
                    let told = said(&run(&format!("{line} {flag} -1"), dir.path()));
                    assert!(told.contains(": -1 is not in "), "{line} {flag}: {told}");
                }
            }
            for flag in help.lines().filter_map(|line| line.trim().strip_suffix(" <AGE>")) {
                flags += 1;
                for value in ["1s", "1"] {
                    is_taken(&format!("{flag} {value}"));
                }
                let told = said(&run(&format!("{line} {flag} 1x"), dir.path()));
                assert!(told.contains("invalid value '1x'"), "{line} {flag}: {told}");
            }
        }
    }
    assert!(flags > 20 && counts > 20, "{flags} {counts}");
    assert_eq!(
        sockets,
        [
            "deltapath driver",
            "deltapath-gateway",
            "deltapath-router",
            "deltapath-router delete-volume",
            "deltapath-router node-certificate",
            "cbt-backup full",
            "cbt-backup incremental",
            "cbt-backup auto",
            "cbt-backup show",
            "cbt-earlier differential",
            "cbt-earlier cbt-http",
            "cbt-lab bench",
            "cbt-lab conformance",
        ]
    );
    assert_eq!(
        servers,
        [
            "deltapath driver",
            "deltapath-gateway",
            "deltapath-router",
            "cbt-earlier differential",
            "cbt-earlier aggregated",
            "cbt-earlier cbt-http",
        ]
    );
    assert_eq!(
        quiet,
        [
            "deltapath verify",
            "cbt-backup full",
            "cbt-backup incremental",
            "cbt-backup auto",
            "cbt-backup run",
            "cbt-backup restore",
            "cbt-backup verify",
            "cbt-lab bench",
        ]
    );
    // A program that is installed as a plugin of kubectl goes by kubectl's name.
    for (name, usage) in
        [("cbt-backup", "Usage: cbt-backup list"), ("kubectl-cbt", "Usage: kubectl cbt list")]
    {
        let output = command("cbt-backup list --no-such-flag", dir.path()).arg0(name).output().expect("run");
        assert!(said(&output).contains(usage), "{name}: {}", said(&output));
    }
}
