#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cbt_backup::fuzz::run("backup_nbd", bytes));
