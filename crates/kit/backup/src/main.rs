//! The program `cbt-backup`.
#![forbid(unsafe_code)]

/// The one of the C library keeps what threads have freed, by the pack.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cbt_backup::main()
}
