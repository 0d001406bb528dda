# shellcheck shell=bash
# Sourced by what begins in a mount namespace of its own. That has a copy of every mount of the machine, and would keep busy
# what others unmount. None is needed but those that some directories are in: leave_mounts_of_others DIRECTORY...
leave_mounts_of_others() {
    local place directory
    while read -r _ place _; do
        case "$place" in /tmp/* | /var/tmp/* | /mnt/* | /media/*) ;; *) continue ;; esac
        for directory in "$@"; do
            case "$directory/" in "$place"/*) continue 2 ;; esac
        done
        umount --lazy "$place" 2>/dev/null || true
    done < <(tac /proc/mounts)
}
