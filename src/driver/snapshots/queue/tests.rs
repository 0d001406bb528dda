use crate::driver::snapshots::queue::*;

fn id() -> SnapshotId {
    SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id")
}

fn volume(letter: char) -> VolumeId {
    format!("vol-{}", letter.to_string().repeat(32)).parse().expect("an id")
}

/// The expected steps are written as `A2` for the changes of volume a's second snapshot, `~a2` for its skip maps, and `a2`
/// for its rest. Each job is a volume, a sequence number, and the numbers of steps that its changes and its rest take.
#[test]
fn changes_go_first_and_volumes_take_turns() {
    type Jobs = &'static [(char, u64, u32, u32)];
    let cases: &[(Jobs, &str)] = &[
        (&[], ""),
        // Within a volume: changes from the newest on, then the rest from the oldest on.
        (&[('a', 1, 1, 1), ('a', 2, 1, 1), ('a', 3, 1, 1)], "A3 A2 A1 a1 a2 a3 ~a1 ~a2 ~a3"),
        // A first snapshot of many steps does not delay others.
        (&[('a', 1, 1, 4), ('b', 1, 1, 1), ('b', 2, 1, 1)], "A1 B2 B1 a1 b1 a1 b2 a1 a1 ~b1 ~a1 ~b2"),
        // Changes of many steps do not delay the changes of other volumes.
        (&[('a', 2, 4, 1), ('b', 2, 1, 1), ('c', 2, 2, 1)], "A2 B2 C2 A2 C2 A2 A2 b2 c2 a2 ~b2 ~c2 ~a2"),
    ];
    for (jobs, expected) in cases {
        let mut state = State::default();
        let mut steps = BTreeMap::new();
        for (letter, sequence, changes, rest) in jobs.iter() {
            let place = (volume(*letter), *sequence);
            state.add(&place, &id(), 1);
            steps.insert((place.clone(), Part::Changes as u8), *changes);
            steps.insert((place.clone(), Part::Skips as u8), 1);
            steps.insert((place, Part::Rest as u8), *rest);
        }
        let mut done = Vec::new();
        while let Some(work) = state.next(Instant::now()) {
            let left = steps.get_mut(&(work.place.clone(), work.part as u8)).expect("a job");
            *left -= 1;
            if *left > 0 {
                state.again(&work, FIRST);
            }
            let letter = &work.place.0.as_str()[4..5];
            let name = match work.part {
                Part::Changes => letter.to_uppercase(),
                Part::Skips => format!("~{letter}"),
                Part::Rest => letter.to_owned(),
            };
            done.push(format!("{name}{}", work.place.1));
        }
        assert_eq!(done.join(" "), *expected);
    }
}

#[test]
fn a_part_that_failed_waits_and_holds_up_no_other() {
    let hashing = Queue::default();
    let (place, now) = ((volume('a'), 1), Instant::now());
    hashing.state().add(&place, &id(), 1);
    let next = |after: u32| hashing.state().next(now + after * RETRY);
    let changes = next(0).expect("changes");
    hashing.put_off(&changes);
    let rest = next(0).expect("the rest");
    assert_eq!((changes.part, rest.part), (Part::Changes, Part::Rest));
    hashing.done(&rest);
    hashing.done(&next(0).expect("its skip maps"));
    assert_eq!(next(0), None);
    let again = next(2).expect("changes again");
    assert_eq!((again.part, again.failures), (Part::Changes, 1));
    hashing.put_off(&again);
    assert_eq!(next(1), None, "twice as late");
    hashing.done(&next(3).expect("the third try"));
    assert!(hashing.state().volumes.is_empty());
}

#[test]
fn what_is_hashed_is_freed_before_others_are_hashed() {
    let mut state = State::default();
    for (letter, left) in [('a', 5), ('b', 0), ('c', 5)] {
        state.add(&(volume(letter), 1), &id(), left);
    }
    let first = state.next(Instant::now()).expect("work");
    assert_eq!((first.part, first.place.0), (Part::Rest, volume('b')));
}

/// The queue as it would be without any index: each step looks at all jobs.
#[derive(Default)]
struct Naive {
    jobs: BTreeMap<Position, Job>,
    served: BTreeMap<VolumeId, u64>,
    steps: u64,
}

impl Naive {
    fn next(&mut self, now: Instant) -> Option<(Position, Part)> {
        let mut best: Option<((Rank, u64), &Position)> = None;
        for (place, job) in &self.jobs {
            let is_due = |attempt: &Try| attempt.due.is_none_or(|due| now >= due);
            let due = job.parts.iter().filter(|(_, attempt)| is_due(attempt));
            let Some(rank) = due.map(|(part, _)| job.rank(*part)).min() else { continue };
            let served = self.served.get(&place.0).copied().unwrap_or(0);
            // Places ascend, so within a volume the first is the oldest snapshot and the last the newest.
            let is_better = best.is_none_or(|((other, last), of)| match place.0 == of.0 {
                true => rank < other || (rank == other && rank == Rank::Changes),
                false => (rank, served) < (other, last),
            });
            if is_better {
                best = Some(((rank, served), place));
            }
        }
        let ((rank, _), place) = best?;
        let place = place.clone();
        self.steps += 1;
        self.served.insert(place.0.clone(), self.steps);
        self.jobs.get_mut(&place)?.parts.remove(&rank.part());
        Some((place, rank.part()))
    }

    fn remove(&mut self, place: &Position) {
        self.jobs.remove(place);
        if !self.jobs.keys().any(|(volume, _)| *volume == place.0) {
            self.served.remove(&place.0);
        }
    }
}

/// Not from an incident: without indexes, each step looks at all jobs, which is slow with a backlog of 20,000 snapshots.
/// The indexes must give the same order.
#[test]
fn the_order_is_that_of_a_queue_that_looks_at_all_jobs() {
    let mut steps = 0;
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut state, mut naive) = (State::default(), Naive::default());
        let (mut now, mut under_way) = (Instant::now(), Vec::<Work>::new());
        for _ in 0..400 {
            let place = (volume(random.char('a'..='e')), random.u64(1..6));
            match random.u32(0..10) {
                0 | 1 => {
                    let bytes = random.u64(0..3);
                    state.add(&place, &id(), bytes);
                    let job = naive.jobs.entry(place).or_insert_with(|| Job::new(id(), bytes));
                    job.left = bytes;
                    job.parts.insert(Part::Changes, FIRST);
                    job.parts.entry(Part::Skips).or_insert(FIRST);
                    job.parts.entry(Part::Rest).or_insert(FIRST);
                }
                2 => {
                    state.forget(&place);
                    naive.remove(&place);
                }
                3 => {
                    state.progress(&place, 1);
                    naive.jobs.entry(place).and_modify(|job| job.left = job.left.saturating_sub(1));
                }
                4 => now += RETRY * random.u32(0..4),
                5 | 6 if !under_way.is_empty() => {
                    let work = under_way.swap_remove(random.usize(..under_way.len()));
                    let job = naive.jobs.get_mut(&work.place);
                    match random.u32(0..3) {
                        0 => {
                            state.again(&work, FIRST);
                            job.map(|job| *job.parts.entry(work.part).or_insert(FIRST));
                        }
                        1 => {
                            state.put_off(&work, now);
                            let attempt = Try {
                                due: Some(
                                    now + (RETRY * (1 << work.failures.min(16))).min(RETENTION_INTERVAL),
                                ),
                                failures: work.failures + 1,
                            };
                            job.map(|job| *job.parts.entry(work.part).or_insert(attempt));
                        }
                        _ => {
                            state.done(&work);
                            if job.is_some_and(|job| job.parts.is_empty()) {
                                naive.remove(&work.place);
                            }
                        }
                    }
                }
                _ => {
                    let work = state.next(now);
                    let found = work.as_ref().map(|work| (work.place.clone(), work.part));
                    assert_eq!(found, naive.next(now), "seed {seed}");
                    steps += usize::from(work.is_some());
                    under_way.extend(work);
                }
            }
            let left: u64 = naive.jobs.values().map(|job| job.left).sum();
            assert_eq!(state.left, left, "seed {seed}");
            assert_eq!(state.volumes.values().map(|line| line.jobs.len()).sum::<usize>(), naive.jobs.len());
        }
    }
    assert!(steps > 10_000, "{steps} steps");
}
