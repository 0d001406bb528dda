//! Protocols between threads, under a model checker that chooses which thread runs at each lock: in random schedules, and in
//! schedules that change the thread seldom, at unlikely moments (PCT). `make interleavings` runs them. Seen are the locks of `crate::sync`,
//! and in lives of a driver each operation on a file; sockets and tokio are not. A thread that nobody wakes is reported as a deadlock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::AtomicBool;
use shuttle::{Config, Runner, thread};

use crate::driver::error::Error;
use crate::driver::lives::{Life, Step, wanted};
use crate::driver::locks::{LockKey, OpLocks};
use crate::driver::metadata::streams::{MESSAGES, SHORT, Streams, TUPLE};
use crate::driver::request::create::SourceRef;
use crate::driver::snapshots::queue::{Next, Part, Queue};
use crate::driver::transfer::transfers::Transfers;
use crate::driver::volumes::incoming::Phase;
use crate::driver::volumes::remote::{Blocks, Opened, Remote, RemoteFault};
use crate::store::SnapshotRecord;
use base::{BlockSize, Foreground, Stop, VolumeId};
use cbt::SegmentIndex;
use roaring::RoaringBitmap;

/// Schedules of each kind; `DELTAPATH_SCHEDULES` sets another number.
fn schedules() -> usize {
    std::env::var("DELTAPATH_SCHEDULES").ok().and_then(|count| count.parse().ok()).unwrap_or(10_000)
}

fn check(protocol: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(protocol.clone(), schedules());
    shuttle::check_pct(protocol, schedules(), 3);
}

/// Lives of a driver on real files. Each takes some milliseconds, so there are fewer of them.
fn check_lives(life: fn()) {
    let mut config = Config::default();
    config.stack_size = 1 << 20;
    let life = move || {
        files::interleavings::switch_at_each_operation(|| _ = AtomicBool::new(false).load(Ordering::Relaxed));
        life();
    };
    Runner::new(RandomScheduler::new(schedules() / 100), config.clone()).run(life);
    Runner::new(PctScheduler::new(3, schedules() / 100), config).run(life);
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

/// Three snapshots of a volume: from one to the next blocks are written, punched, and written again as they were.
fn three_snapshots(retained: usize) -> Life {
    let mut life = Life::new("example", retained);
    let write = |at, byte| Step::Write { at, byte };
    let steps = [
        &[write(0, 1), write(1, 1), write(7, 2), write(8, 1), Step::Snapshot][..],
        &[write(0, 2), Step::Punch { at: 1 }, write(7, 2), write(8, 2), Step::Snapshot],
        &[write(7, 1), write(8, 1), write(255, 1), Step::Snapshot],
    ];
    steps.concat().iter().for_each(|step| life.play(step));
    life
}

/// Hashes and compares until `others` have ended.
fn with_hashing(life: &Arc<Life>, others: Vec<thread::JoinHandle<()>>) {
    let hashing = life.driver().hashing.clone();
    let worker = thread::spawn({
        let hashing = hashing.clone();
        move || hashing.run(None)
    });
    others.into_iter().for_each(|thread| thread.join().expect("a thread"));
    hashing.queue.cease();
    worker.join().expect("the worker");
}

/// Hashes and compares the snapshots of a life, while one of them is deleted and two streams list what is different from the first
/// to the last.
fn hash_delete_and_stream(retained: usize, deleted: usize) {
    let mut life = Arc::new(three_snapshots(retained));
    let other = |work: fn(&Life, usize)| {
        let life = life.clone();
        thread::spawn(move || work(&life, deleted))
    };
    let others = vec![
        other(|life, _| life.compare(0, 2)),
        other(|life, _| life.compare(0, 2)),
        other(|life, deleted| life.driver().snapshots.delete(&life.snapshots[deleted].0).expect("delete")),
    ];
    with_hashing(&life, others);
    let life = Arc::get_mut(&mut life).expect("all others have ended");
    life.compare(0, 2);
    life.play(&Step::Reopen);
    life.compare(0, 2);
    life.close();
}

/// A delta from a snapshot that is deleted, retained, hashed and freed meanwhile is exact.
#[test]
fn deltas_from_a_base_that_goes_are_exact() {
    check_lives(|| hash_delete_and_stream(100, 0));
}

/// A delta is exact while a snapshot between its two is removed, and its changes are merged into the next one's.
#[test]
fn deltas_over_a_snapshot_that_goes_are_exact() {
    check_lives(|| hash_delete_and_stream(0, 1));
}

/// A source on another node: one block with data, which is still to be sent or not.
struct Far(bool);

impl Remote for Far {
    fn open(&mut self, _: &str, _: &Stop) -> Result<Opened, RemoteFault> {
        Ok(Opened {
            capacity: 1 << 20,
            block_size: BlockSize::MIN,
            tracking: true,
            segments: vec![SegmentIndex(0)],
            allocated_blocks: 1,
            relatives: Vec::new(),
            filesystem: None,
        })
    }

    fn map(&mut self, _: SegmentIndex, _: &Stop) -> Result<RoaringBitmap, RemoteFault> {
        Ok(RoaringBitmap::from([0]))
    }

    fn hashes(&mut self, _: SegmentIndex, _: &RoaringBitmap, _: &Stop) -> Result<Vec<u8>, RemoteFault> {
        Ok(blake3::hash(&[7; 4096]).as_bytes().to_vec())
    }

    fn read(&mut self, _: SegmentIndex, _: &RoaringBitmap, _: &Stop) -> Result<(), RemoteFault> {
        self.0 = true;
        Ok(())
    }

    fn next(&mut self, _: &Stop) -> Result<Option<Blocks>, RemoteFault> {
        let hashes = blake3::hash(&[7; 4096]).as_bytes().to_vec().into();
        let blocks = Blocks { data: vec![7; 4096].into(), hashes, holes: Vec::new() };
        Ok(std::mem::take(&mut self.0).then_some(blocks))
    }

    fn close(&mut self) {}

    fn node(&self) -> &str {
        "another node"
    }
}

/// A volume that was deleted while it was copied from another node stays away, whoever asks for its name meanwhile. In the end
/// no transfer runs, and none is known that became a volume.
#[test]
fn a_volume_that_is_deleted_while_it_is_copied_does_not_come_back() {
    check_lives(|| {
        let mut life = Life::new("example", 0);
        let transfers = life.driver().transfers.clone();
        let source = SourceRef::Snapshot(format!("snap-0badcafe{}", "0".repeat(24)));
        let ask = move |transfers: &Arc<Transfers>| match transfers
            .create_volume(&wanted("copied", Some(source.clone())), Box::new(Far(false)))
        {
            Ok(_) | Err(Error::Copying { .. } | Error::Busy { .. }) => {}
            Err(error) => panic!("{error}"),
        };
        let asking = thread::spawn({
            let transfers = transfers.clone();
            move || (0..2).for_each(|_| ask(&transfers))
        });
        let ids = std::iter::repeat_with(|| {
            thread::yield_now();
            transfers.table.id_of("copied")
        });
        let deleted = ids.take(20).flatten().next();
        let deleted = deleted.filter(|id| life.driver().volumes.delete(id.as_str()).is_ok());
        asking.join().expect("it asks");
        transfers.stop();
        let made = |id: &VolumeId| transfers.shared.store.read(|index| index.volume(id).is_some());
        assert!(deleted.iter().all(|id| !made(id)), "a deleted volume is there");
        let known: Vec<_> = transfers.table.known().values().cloned().collect();
        for transfer in known {
            assert!(!matches!(transfer.state().phase, Phase::Running), "a transfer runs on");
            assert!(!made(&transfer.record.id), "a volume is still a transfer");
        }
        assert_eq!(*transfers.working.lock(), 0, "turns that nobody has");
        drop(transfers);
        life.close();
    });
}
