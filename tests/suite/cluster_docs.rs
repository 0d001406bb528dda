//! The scripts and the pages about clusters: scripts pass shellcheck, and the paths, make targets and flags that they name
//! exist.

use std::process::Command;

use crate::manifests::{Found, containers, files, objects, objects_of, pod_spec, repository};
use testkit::pages::{read, section};

#[test]
fn scripts_pass_shellcheck() {
    let scripts = files("hack", "sh");
    assert!(scripts.len() >= 9, "{scripts:?}");
    let mut command = Command::new("shellcheck");
    command.current_dir(repository()).arg("-x").args(&scripts).arg(".ci/run");
    let output = command.output().expect("shellcheck, which `make test-deps` installs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Words of a text that look like a path of this repository.
fn paths(text: &str) -> Vec<&str> {
    let part_of_path = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let words = text.split(|c: char| !part_of_path(c)).map(|word| word.trim_end_matches(['.', '/']));
    words
        .filter(|word| {
            [
                "deploy/",
                "hack/",
                "docs/",
                "tests/",
                "src/",
                "benches/",
                "crates/",
                "examples/minimal",
                "proto/",
            ]
            .iter()
            .any(|top| word.starts_with(top))
        })
        .collect()
}

/// All pages of the repository.
pub fn pages() -> Vec<String> {
    let mut pages = files("docs", "md");
    pages.extend(files("deploy", "md"));
    pages.extend(files("crates", "md"));
    pages.extend(
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(String::from),
    );
    pages
}

/// The names by which a link reaches the headings of a page, as GitHub and mdBook make them.
fn anchors(page: &str) -> Vec<String> {
    let mut fenced = false;
    let mut anchors: Vec<String> = Vec::new();
    for line in page.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let title = line.trim_start_matches('#');
        if fenced || title == line || !title.starts_with(' ') {
            continue;
        }
        let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        let anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let same = anchors.iter().filter(|other| **other == anchor).count();
        anchors.push(if same == 0 { anchor } else { format!("{anchor}-{same}") });
    }
    anchors
}

#[test]
fn every_path_in_pages_scripts_and_manifests_exists() {
    let (mut seen, mut headings) = (0, 0);
    let scripts = files("hack", "sh").into_iter().chain(files("deploy", "yaml"));
    for file in pages().into_iter().chain(scripts) {
        let text = read(&file);
        for path in paths(&text).into_iter().filter(|_| !file.starts_with("crates") && file != "CHANGELOG.md")
        {
            assert!(repository().join(path).exists(), "{file} names {path}, which does not exist");
            seen += 1;
        }
        if !file.ends_with(".md") {
            continue;
        }
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") {
                continue;
            }
            let (page, heading) = target.split_once('#').unwrap_or((target, ""));
            let place = repository().join(&file);
            let place = if page.is_empty() { place } else { place.parent().expect("a directory").join(page) };
            assert!(place.exists(), "{file} links to {page}");
            if !heading.is_empty() && page.ends_with(".md") | page.is_empty() {
                let there = anchors(&std::fs::read_to_string(&place).expect("a page"));
                assert!(there.iter().any(|anchor| anchor == heading), "{file} links to {target}: {there:?}");
                headings += 1;
            }
        }
    }
    assert!(seen > 40 && headings > 40, "only {seen} paths and {headings} headings are seen");
}

#[test]
fn every_make_target_in_the_pages_exists() {
    let (makefile, mut seen) = (read("Makefile"), 0);
    for file in pages() {
        // Targets in code are after a backtick, or at the beginning of a line.
        let text = read(&file).replace("\nmake ", "`make ");
        for named in text.split("`make ").skip(1) {
            let end = named.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(named.len());
            let target = &named[..end];
            assert!(
                makefile.contains(&format!("\n{target}:")),
                "{file}: the Makefile has no target {target}"
            );
            seen += 1;
        }
    }
    assert!(seen > 40, "only {seen} targets are seen");
}

/// If a page calls one of our scripts, the script has the flags that the page uses.
#[test]
fn every_flag_of_a_script_in_the_pages_is_one_of_its() {
    for file in pages() {
        let text = read(&file);
        for line in text.lines().filter(|line| line.trim_start().starts_with("hack/")) {
            let mut words = line.split('#').next().expect("a line").split_whitespace();
            let script = read(words.next().expect("a script"));
            for flag in words.filter(|word| word.starts_with("--")) {
                let flag = flag.split('=').next().expect("a flag");
                assert!(script.contains(&format!(" {flag})")), "{file}: {line}: no flag {flag}");
            }
        }
    }
}

/// Whoever installs is told what to wait for and where to look, with many drivers and with one.
#[test]
fn the_workloads_of_the_page_are_those_of_its_overlays() {
    let page = read("docs/install.md");
    let kustomize = section(&page, "By kustomize");
    for (before, overlay) in [
        ("kubectl rollout status -n deltapath ", "deploy/overlays/distributed"),
        ("# with one driver: ", "deploy/overlays/kind"),
    ] {
        let named: Vec<_> =
            kustomize.split(before).skip(1).filter_map(|rest| rest.split_whitespace().next()).collect();
        assert_eq!(named.len(), 2, "{before}");
        for name in named {
            let is = |found: &&Found| format!("{}/{}", found.kind().to_lowercase(), found.name()) == name;
            assert!(objects_of(overlay).iter().any(is), "{overlay} has no {name}");
        }
    }
    let preflight = section(&page, "What a node needs");
    for kind in ["statefulset", "daemonset"] {
        assert!(preflight.contains(&format!("{kind}/deltapath-plugin")), "{kind}: {preflight}");
    }
    // The overlay alone is no cluster with snapshots.
    let kind = section(&page, "kind");
    for word in ["CLUSTER=NAME hack/install.sh", "CRDs", "snapshot controller"] {
        assert!(kind.split("cluster of your own").nth(1).is_some_and(|rest| rest.contains(word)), "{word}");
    }
}

/// docs/install.md has the versions of the sidecars in the manifests.
#[test]
fn the_table_of_versions_is_that_of_the_manifests() {
    let page = read("docs/install.md");
    let table = page.split("## Versions").nth(1).and_then(|rest| rest.split("\n## ").next());
    let table = table.expect("a section about versions");
    let mut seen = 0;
    for container in objects().iter().filter_map(|found| pod_spec(&found.object)).flat_map(containers) {
        let image = container["image"].as_str().expect("an image");
        let Some((name, version)) =
            image.strip_prefix("registry.k8s.io/sig-storage/").and_then(|rest| rest.split_once(':'))
        else {
            continue;
        };
        let row = table.lines().find(|line| line.split('|').nth(1).is_some_and(|cell| cell.contains(name)));
        let row = row.unwrap_or_else(|| panic!("docs/install.md has no version of {name}"));
        assert!(row.contains(&format!(" {version} ")), "{name} is {version}, and docs/install.md says {row}");
        seen += 1;
    }
    assert!(seen > 9, "only {seen} sidecars are seen");
}

/// The scripts install the versions that the manifests use.
#[test]
fn scripts_and_manifests_are_of_the_same_releases() {
    let lib = read("hack/lib.sh");
    let of = |name: &str| {
        let line = lib.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("hack/lib.sh sets no {name}")).to_owned()
    };
    let plugin = read("deploy/base/plugin.yaml");
    assert!(plugin.contains(&format!("csi-snapshotter:{}\n", of("snapshotter_version"))));
    let community = read("deploy/components/community-sidecar/kustomization.yaml");
    assert!(community.contains(&format!("csi-snapshot-metadata:{}\n", of("snapshot_metadata_version"))));
    let checker = read("hack/manifests/go.mod");
    assert!(checker.contains(&format!("external-snapshotter/client/v8 {}\n", of("snapshotter_version"))));
    let node = of("node_image");
    let kubernetes = node.split([':', '@']).nth(1).expect("a tag");
    assert!(
        checker.contains(&format!("k8s.io/kubernetes {kubernetes}\n")),
        "hack/manifests/go.mod is not for Kubernetes {kubernetes}"
    );
}
