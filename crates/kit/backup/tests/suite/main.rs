//! `cbt-backup` as its users run it: the real program on real files, devices, drivers and servers.
#![allow(clippy::disallowed_methods)]

mod api;
mod clock;
mod damage;
mod docs;
mod driver;
mod faults;
mod history;
mod hostile;
mod lies;
mod locks;
mod mount;
mod odd;
mod power;
mod progress;
mod proxy;
mod real;
mod restoring;
mod resume;
mod rights;
mod s3;
mod scenes;
mod show;
mod tool;
mod traps;
mod usage;
mod wishes;
