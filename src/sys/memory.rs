//! The memory of this process.

/// From this size on an allocation has pages of its own, which go back to the kernel when it is freed.
#[cfg(target_env = "gnu")]
const OWN_PAGES: libc::c_int = 1 << 20;

/// Has large buffers go back to the kernel when they are freed, at the price of a system call each. By default the
/// allocator raises the size for that with the first one freed, and keeps later ones: some in each of its arenas, of which
/// there are eight a core.
pub fn return_large_buffers() {
    #[cfg(target_env = "gnu")]
    for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: mallopt takes two numbers; a value that it refuses changes nothing.
        unsafe { libc::mallopt(parameter, OWN_PAGES) };
    }
}

/// Gives memory that was freed back to the kernel: the allocator keeps free memory between blocks in use.
pub fn give_back() {
    // SAFETY: malloc_trim takes no pointer, locks what it works on, and only free pages are given back.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
