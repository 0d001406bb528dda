//! The memory of this process.

/// Gives memory that was freed back to the kernel: the allocator keeps what lies between what is in use.
pub fn give_back() {
    // SAFETY: malloc_trim takes no pointer, locks what it works on, and only pages that nobody holds are given back.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
