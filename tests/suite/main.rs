//! The integration tests: one binary, one file per subject. They run the real driver in its own process, on real loop
//! devices and filesystems, and call it over its real socket.
#![allow(clippy::disallowed_methods)]

#[macro_use]
extern crate macro_rules_attribute;
#[macro_use]
extern crate testkit;

mod access_types;
mod arrows;
mod bench;
mod chaos;
mod check;
mod clients;
mod cluster_classes;
mod cluster_docs;
mod cluster_faults;
mod cluster_image;
mod cluster_rbac;
mod cluster_rules;
mod cluster_scripts;
mod commands;
mod conformance;
mod crash;
mod csi_contract;
mod demo;
mod docs;
mod durability;
mod ends;
mod expansion;
mod faults;
mod format;
mod groups;
mod growth;
mod hashing;
mod health;
mod hostile;
mod links;
mod lists;
mod manifests;
mod metadata;
mod model;
mod node;
mod node_filesystem;
mod not_ours;
mod order;
mod power;
mod property;
mod reboot;
mod retained;
mod sanity;
mod secrets;
mod security;
mod seeds;
mod skips;
mod snapshots;
mod startup;
mod streams;
mod usage;
mod volume_health;
mod volumes;

/// Without root the tests that need it are ignored, and the runner says so. In CI that is a failure.
#[test]
fn ci_runs_as_root() {
    let user = nix::unistd::geteuid().as_raw();
    let is_ci = std::env::var("CI").as_deref() == Ok("true");
    assert!(
        !is_ci || user == 0,
        "most tests attach loop devices and mount: run them as root, not as user {user}"
    );
}
