//! The router as its clients see it: the real program, in front of real drivers with volumes on real devices.
#![allow(clippy::disallowed_methods)]
#![allow(missing_docs)]

#[macro_use]
extern crate macro_rules_attribute;
#[macro_use]
extern crate testkit;

mod apart;
mod certificates;
mod cuts;
mod every_call;
mod lists;
mod names;
mod nodes;
mod signing;
mod slices;
mod strangers;
mod streams;
mod suites;
mod transfer_bounds;
mod transfer_cuts;
mod transfer_damage;
mod transfer_figures;
mod transfer_holes;
mod transfer_kills;
mod transfer_names;
mod transfer_points;
mod transfers;
mod twins;
