//! The integration tests: one binary, a file a subject. They run the real driver in a process of its
//! own, on real loop devices and filesystems, over its real socket.

mod arrows;
mod chaos;
mod cluster_classes;
mod cluster_docs;
mod cluster_image;
mod cluster_metadata;
mod cluster_rbac;
mod cluster_rules;
mod cluster_scripts;
mod conformance;
mod crash;
mod csi_contract;
mod demo;
mod docs;
mod durability;
mod expansion;
mod groups;
mod health;
mod hostile;
mod lists;
mod manifests;
mod metadata;
mod node;
mod power;
mod property;
mod reboot;
mod retained;
mod sanity;
mod secrets;
mod snapshots;
mod startup;
mod streams;
mod support;
mod usage;
mod volumes;
