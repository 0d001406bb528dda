//! Loop devices and the filesystems on them: whether a volume is in use, formatting, mounting, sizes. Which volume is
//! where is not decided here, but in `node`.

pub(in crate::driver) mod attached;
pub(in crate::driver) mod filesystem;
pub(in crate::driver) mod superblock;
