//! The memory of this process.

use parking_lot::Mutex;

/// From this size on an allocation has pages of its own, which go back to the kernel when it is freed.
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

/// How many [`KeepFreed`] there are.
static KEEPERS: Mutex<usize> = Mutex::new(0);

/// While there is one, freed memory stays with the process, so that buffers that come and go by the thousand are not given
/// back and mapped, cleared and charged again each time.
#[derive(Debug)]
pub struct KeepFreed(());

impl KeepFreed {
    /// From now on, until it is dropped.
    pub fn begin() -> Self {
        let mut keepers = KEEPERS.lock();
        *keepers += 1;
        if *keepers == 1 {
            trim_from(libc::c_int::MAX);
        }
        KeepFreed(())
    }
}

impl Drop for KeepFreed {
    fn drop(&mut self) {
        let mut keepers = KEEPERS.lock();
        *keepers -= 1;
        if *keepers == 0 {
            trim_from(OWN_PAGES);
            give_back();
        }
    }
}

/// How many free bytes an arena keeps at its end.
fn trim_from(bytes: libc::c_int) {
    // SAFETY: mallopt takes two numbers; a value that it refuses changes nothing.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, bytes);
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = bytes;
}
