//! Protocols between threads, under a model checker that chooses which thread runs at each lock: in random schedules, and in
//! schedules that change the thread seldom, at unlikely moments (PCT). `make interleavings` runs them. Only the locks of `crate::sync` are
//! seen, so what goes through files, sockets and tokio is not covered. A thread that nobody wakes is reported as a deadlock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::thread;

use crate::driver::locks::{LockKey, OpLocks};
use crate::driver::metadata::streams::{MESSAGES, SHORT, Streams, TUPLE};
use crate::driver::snapshots::queue::{Next, Part, Queue};
use crate::store::SnapshotRecord;
use base::{Foreground, Stop, VolumeId};

/// Schedules of each kind; `DELTAPATH_SCHEDULES` sets another number.
fn schedules() -> usize {
    std::env::var("DELTAPATH_SCHEDULES").ok().and_then(|count| count.parse().ok()).unwrap_or(10_000)
}

fn check(protocol: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(protocol.clone(), schedules());
    shuttle::check_pct(protocol, schedules(), 3);
}

fn volume(letter: char) -> VolumeId {
    format!("vol-{}", letter.to_string().repeat(32)).parse().expect("an id")
}

/// Work on an object that only one thread may do at a time.
fn work(at: &AtomicUsize) {
    assert_eq!(at.fetch_add(1, Ordering::Relaxed), 0, "two threads work on one object");
    thread::yield_now();
    at.fetch_sub(1, Ordering::Relaxed);
}

/// No two threads hold the lock of one object; all that wait get it; one that gives up or is refused leaves no lock.
#[test]
fn an_object_has_one_holder_and_all_who_wait_have_their_turn() {
    check(|| {
        let locks = OpLocks::default();
        let working = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let history = |letter| LockKey::History(volume(letter));
        let mut threads = Vec::new();
        // Groups lock the histories of their volumes in the order of the ids.
        for volumes in [&['a', 'b'][..], &['a', 'b'], &['b']] {
            let (locks, working) = (locks.clone(), working.clone());
            threads.push(thread::spawn(move || {
                let held: Vec<_> = volumes.iter().map(|letter| locks.wait(history(*letter))).collect();
                volumes.iter().for_each(|letter| work(&working[usize::from(*letter == 'b')]));
                drop(held);
            }));
        }
        let stop = Stop::default();
        for waits in [true, false] {
            let (locks, working, stop) = (locks.clone(), working.clone(), stop.clone());
            threads.push(thread::spawn(move || {
                let held = match waits {
                    true => locks.wait_until(history('a'), &stop).ok(),
                    false => locks.take(history('a')).ok(),
                };
                if held.is_some() {
                    work(&working[0]);
                }
            }));
        }
        stop.cancel();
        threads.into_iter().for_each(|thread| thread.join().expect("a thread"));
        assert!(!locks.is_held(&history('a')) && !locks.is_held(&history('b')), "a lock is left");
    });
}

fn record(sequence: u64) -> SnapshotRecord {
    let id = format!("snap-{sequence:032x}");
    let record = serde_json::json!({
        "version": 3, "id": id, "name": "", "group": null, "volume": volume('a'), "sequence": sequence,
        "capacity": 4096, "block_size": 4096, "tracking": true, "tuple_style": null,
        "created": { "seconds": 0, "nanos": 0 }, "birth": null,
    });
    serde_json::from_value(record).expect("a record")
}

/// What is queued is worked on, whoever queues and removes meanwhile; the thread that works ends when it must; nothing is
/// left to be counted.
#[test]
fn the_queue_loses_no_work_and_no_wakeup() {
    check(|| {
        let queue = Arc::new(Queue::default());
        let worker = thread::spawn({
            let queue = queue.clone();
            move || {
                let mut steps = BTreeMap::<_, u32>::new();
                while let Next::Work(work) = queue.next() {
                    if work.part == Part::Rest {
                        queue.progress(&record(if work.id == record(1).id { 1 } else { 2 }), 1);
                    }
                    let step = steps.entry((work.id.clone(), work.part)).or_default();
                    *step += 1;
                    // Changes take two steps.
                    match work.part == Part::Changes && *step == 1 {
                        true => queue.go_on(&work),
                        false => queue.done(&work),
                    }
                    // All of the snapshot that stays.
                    let has =
                        |part, least| steps.get(&(record(1).id, part)).is_some_and(|steps| *steps >= least);
                    if has(Part::Changes, 2) && has(Part::Rest, 1) && has(Part::Skips, 1) {
                        return;
                    }
                }
                panic!("it was stopped before the work was done");
            }
        });
        let others = [
            thread::spawn({
                let queue = queue.clone();
                move || {
                    queue.add(&record(2), 1);
                    queue.forget(&record(2));
                }
            }),
            thread::spawn({
                let queue = queue.clone();
                move || queue.add(&record(1), 1)
            }),
            thread::spawn({
                let queue = queue.clone();
                move || queue.add_skips(&record(1))
            }),
        ];
        others.into_iter().for_each(|thread| thread.join().expect("a thread"));
        worker.join().expect("the worker");
        let waiter = thread::spawn({
            let queue = queue.clone();
            move || while !matches!(queue.next(), Next::Stop) {}
        });
        queue.cease();
        waiter.join().expect("it ends");
        assert_eq!(queue.backlog(), 0, "bytes that nobody hashes are counted");
    });
}

/// Messages together take no more than their memory, beyond what each may always hold, and all of it comes back.
#[test]
fn the_memory_of_messages_is_bounded_and_comes_back() {
    check(|| {
        let streams = Arc::new(Streams::new(Arc::new(Foreground::default())));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let streams = streams.clone();
                thread::spawn(move || {
                    for most in [1_000_000, 10 * number] {
                        let (mut share, most) = streams.share(most);
                        assert!(streams.messages() <= MESSAGES + 4 * SHORT * TUPLE, "beyond the bound");
                        share.shrink(most / 2);
                        thread::yield_now();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("a thread"));
        assert_eq!(streams.messages(), 0, "memory is lost");
    });
}
