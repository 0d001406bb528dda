//! Slots of connections on a port that anyone may reach. Every newcomer is let in; where that makes too many, the connection that has
//! been idle for longest is closed, first of those whose client is not known. So strangers keep no one out, and a client that has shown who
//! it is loses an idle connection only to others who have. The same for what calls cost before their callers are known: the stranger with
//! the most of it is closed, and where known clients have more than half of it, a connection of the one with the most.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Connections that the kernel may hold until they are accepted: a crowd must not overflow it, or a client's first packet is lost
/// and comes again only after a second.
const BACKLOG: u32 = 4096;

/// Listens for connections, of which many may come at once.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is accepted. It costs little.
    Open = 0,
    /// Its handshake is done. Anyone can get as far.
    Greeted = 1,
    /// Its client is known.
    Known = 2,
}

/// The most at once: connections, and what their calls cost.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Of each [`Stage`].
    pub stages: [usize; 3],
    /// Of each known client.
    pub each: usize,
    /// Bytes of all calls whose callers are not known.
    pub unknown: usize,
}

/// All slots of a port.
#[derive(Debug)]
pub struct Slots {
    bounds: Bounds,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    /// By age: since the stage was reached or, where there was a call since, since the last one ended.
    stages: [BTreeMap<u64, Arc<Seat>>; 3],
    /// Bytes of calls whose callers are not known, on connections that stay.
    unknown: usize,
}

#[derive(Debug)]
struct Seat {
    close: CancellationToken,
    /// Calls under way.
    open: AtomicUsize,
    /// What it has of [`Taken::unknown`]; changed only while that is locked.
    unknown: AtomicUsize,
    /// Where it is in [`Taken`], and whose; changed only while that is locked.
    at: Mutex<(Stage, u64, String)>,
}

/// The slot of one connection, until it is dropped.
#[derive(Debug)]
pub struct Slot {
    slots: Arc<Slots>,
    seat: Arc<Seat>,
}

impl Slots {
    /// None is taken yet.
    pub fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Slots { bounds, taken: Mutex::default() })
    }

    /// A slot for a newcomer.
    pub fn enter(self: &Arc<Self>) -> Slot {
        let at = Mutex::new((Stage::Open, 0, String::new()));
        let (open, unknown) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let seat = Arc::new(Seat { close: CancellationToken::new(), open, unknown, at });
        self.taken.lock().seat(&seat, Stage::Open, None, &self.bounds);
        Slot { slots: self.clone(), seat }
    }
}

impl Taken {
    /// Puts the seat behind all others of a stage, and makes room there.
    fn seat(&mut self, seat: &Arc<Seat>, stage: Stage, client: Option<&str>, bounds: &Bounds) {
        self.next += 1;
        {
            let mut at = seat.at.lock();
            self.stages[at.0 as usize].remove(&at.1);
            (at.0, at.1) = (stage, self.next);
            if let Some(client) = client {
                client.clone_into(&mut at.2);
            }
        }
        let seats = &mut self.stages[stage as usize];
        seats.insert(self.next, seat.clone());
        if let Some(client) = client {
            let own = seats.iter().filter(|(_, seat)| seat.at.lock().2 == client);
            if own.clone().count() > bounds.each {
                let oldest = own.clone().find(|(_, seat)| seat.is_idle()).map(|(age, _)| *age);
                let oldest = oldest.unwrap_or(self.next);
                self.close(stage, oldest);
            }
        }
        let seats = &self.stages[stage as usize];
        if seats.len() > bounds.stages[stage as usize] {
            let idle = seats.iter().find(|(_, seat)| seat.is_idle()).map(|(age, _)| *age);
            // Strangers' calls end soon anyway; a known client's call may continue.
            let busy = if stage == Stage::Known { None } else { seats.keys().next().copied() };
            let age = idle.or(busy).unwrap_or(self.next);
            self.close(stage, age);
        }
    }

    /// What its calls have ends with the connection.
    fn close(&mut self, stage: Stage, age: u64) {
        if let Some(seat) = self.stages[stage as usize].remove(&age) {
            seat.close.cancel();
            self.give_back(&seat, usize::MAX);
        }
    }

    fn hold(&mut self, seat: &Seat, bytes: usize) {
        seat.unknown.fetch_add(bytes, Ordering::Relaxed);
        self.unknown += bytes;
    }

    /// The seat that makes room. Known clients have no more than half, so that there is always a stranger who has more than a newcomer;
    /// however many connections a client has, it is the client with the most that gives way, and there the connection with the most.
    fn greediest(&self, bounds: &Bounds) -> Option<(Stage, u64)> {
        let [_, strangers, known] = &self.stages;
        if known.values().map(|seat| seat.unknown()).sum::<usize>() <= bounds.unknown / 2 {
            return Some((Stage::Greeted, most(strangers.iter())?));
        }
        let mut clients = HashMap::<String, usize>::new();
        for seat in known.values() {
            *clients.entry(seat.at.lock().2.clone()).or_default() += seat.unknown();
        }
        let (client, _) = clients.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        Some((Stage::Known, most(known.iter().filter(|(_, seat)| seat.at.lock().2 == client))?))
    }

    fn give_back(&mut self, seat: &Seat, bytes: usize) {
        let bytes = bytes.min(seat.unknown());
        seat.unknown.fetch_sub(bytes, Ordering::Relaxed);
        self.unknown -= bytes;
    }
}

/// The age of the seat with the most, of equal ones the oldest.
fn most<'s>(seats: impl Iterator<Item = (&'s u64, &'s Arc<Seat>)>) -> Option<u64> {
    let (age, seat) = seats.max_by_key(|(age, seat)| (seat.unknown(), Reverse(**age)))?;
    (seat.unknown() > 0).then_some(*age)
}

impl Seat {
    fn is_idle(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 0
    }

    fn unknown(&self) -> usize {
        self.unknown.load(Ordering::Relaxed)
    }
}

impl Slot {
    /// Ends when the connection is to be closed.
    pub fn closed(&self) -> WaitForCancellationFutureOwned {
        self.seat.close.clone().cancelled_owned()
    }

    /// Closes the connection.
    pub fn close(&self) {
        self.seat.close.cancel();
    }

    /// The handshake is done.
    pub fn greeted(&self) {
        self.move_to(Stage::Greeted, None);
    }

    /// A call has shown who the client is.
    pub fn known(&self, client: &str) {
        if !self.is_known() {
            self.move_to(Stage::Known, Some(client));
        }
    }

    /// Whether its client is known.
    pub fn is_known(&self) -> bool {
        self.seat.at.lock().0 == Stage::Known
    }

    /// Whether no call is under way.
    pub fn is_idle(&self) -> bool {
        self.seat.is_idle()
    }

    /// A call has begun.
    pub fn begin(&self) {
        self.seat.open.fetch_add(1, Ordering::Relaxed);
    }

    /// A call has ended: if it was the last one, the connection is idle from now on.
    pub fn end(&self) {
        if self.seat.open.fetch_sub(1, Ordering::Relaxed) == 1 && self.is_known() {
            self.move_to(Stage::Known, None);
        }
    }

    /// Counts bytes of a call whose caller is not known, to be given back. Where that makes too many, the greediest connection is closed.
    /// False, and not counted, where that is this one; if its client is known it stays all the same.
    pub fn hold(&self, bytes: usize) -> bool {
        let mut taken = self.slots.taken.lock();
        if self.seat.close.is_cancelled() {
            return false;
        }
        taken.hold(&self.seat, bytes);
        while taken.unknown > self.slots.bounds.unknown {
            let own = self.seat.at.lock().1;
            match taken.greediest(&self.slots.bounds) {
                Some((stage, age)) if stage != Stage::Known || age != own => taken.close(stage, age),
                _ => {
                    taken.give_back(&self.seat, bytes);
                    return false;
                }
            }
        }
        !self.seat.close.is_cancelled()
    }

    /// Gives back what was counted.
    pub fn give_back(&self, bytes: usize) {
        self.slots.taken.lock().give_back(&self.seat, bytes);
    }

    fn move_to(&self, stage: Stage, client: Option<&str>) {
        // One that is closed has left already.
        let mut taken = self.slots.taken.lock();
        if !self.seat.close.is_cancelled() {
            taken.seat(&self.seat, stage, client, &self.slots.bounds);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken.lock();
        let at = self.seat.at.lock();
        taken.stages[at.0 as usize].remove(&at.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_idle_stranger_goes_first_and_a_known_client_only_for_another() {
        let slots = Slots::new(Bounds { stages: [2, 2, 3], each: 2, unknown: 0 });
        let closed = |slot: &Slot| slot.seat.close.is_cancelled();
        // Half-done handshakes.
        let silent: Vec<_> = (0..3).map(|_| slots.enter()).collect();
        assert_eq!(silent.iter().map(closed).collect::<Vec<_>>(), [true, false, false]);
        drop(silent);
        // Strangers, of which the first has a call under way.
        let strangers: Vec<_> = (0..3).map(|_| slots.enter()).inspect(Slot::greeted).collect();
        assert_eq!(strangers.iter().map(closed).collect::<Vec<_>>(), [true, false, false]);
        strangers[1].begin();
        let another = slots.enter();
        another.greeted();
        assert_eq!(strangers.iter().map(closed).collect::<Vec<_>>(), [true, false, true]);
        another.begin();
        let third = slots.enter();
        third.greeted();
        assert!(closed(&third) && !closed(&another) && !closed(&strangers[1]), "the idle one goes first");
        // They are known, and their slots are free for strangers.
        strangers[1].known("ann");
        another.known("bob");
        let crowd: Vec<_> = (0..10).map(|_| slots.enter()).inspect(Slot::greeted).collect();
        assert!(!closed(&strangers[1]) && !closed(&another));
        drop(crowd);
        // One client's own idle one goes for its next.
        let (second, third) = (slots.enter(), slots.enter());
        second.known("ann");
        strangers[1].end();
        third.known("ann");
        assert!(closed(&second) && !closed(&strangers[1]) && !closed(&third), "what was used last stays");
        // With three, the idle one that was used longest ago goes for another client; where none is idle, the newcomer.
        let carl = slots.enter();
        carl.begin();
        carl.known("carl");
        assert!(closed(&strangers[1]) && !closed(&another) && !closed(&carl));
        third.begin();
        let dora = slots.enter();
        dora.begin();
        dora.known("dora");
        assert!(closed(&dora) && [&another, &third, &carl].into_iter().all(|slot| !closed(slot)));
        drop((strangers, another, second, third, carl, dora));
        assert!(slots.taken.lock().stages.iter().all(BTreeMap::is_empty));
    }

    #[test]
    fn the_stranger_whose_calls_cost_most_goes() {
        let slots = Slots::new(Bounds { stages: [9, 9, 9], each: 9, unknown: 10 });
        let closed = |slot: &Slot| slot.seat.close.is_cancelled();
        let [small, large, newcomer, known] = std::array::from_fn(|_| slots.enter());
        [&small, &large, &newcomer].into_iter().for_each(Slot::greeted);
        known.known("ann");
        assert!(small.hold(3) && large.hold(3) && large.hold(1) && known.hold(3));
        assert!(newcomer.hold(2) && closed(&large) && !closed(&small) && !closed(&newcomer));
        // What is closed has nothing any more, and gets nothing.
        large.give_back(4);
        assert!(!large.hold(1) && slots.taken.lock().unknown == 8);
        // Of equal ones the oldest.
        assert!(newcomer.hold(1) && known.hold(2) && closed(&small) && !closed(&newcomer));
        assert!(!newcomer.hold(8) && closed(&newcomer), "it has the most itself");
        assert!(known.hold(5) && !known.hold(1) && !closed(&known), "no stranger is left");
        known.give_back(10);
        assert!(known.hold(10));
        known.give_back(10);
        assert_eq!(slots.taken.lock().unknown, 0);
    }

    /// One user without any right could hold all of it, on connections that were closed for nobody.
    #[test]
    fn known_clients_leave_half_of_it_to_strangers_and_the_greediest_gives_way() {
        let slots = Slots::new(Bounds { stages: [9, 9, 9], each: 9, unknown: 12 });
        let closed = |slots: &[Slot]| slots.iter().filter(|slot| slot.seat.close.is_cancelled()).count();
        let greedy: Vec<_> = (0..4).map(|_| slots.enter()).collect();
        // What it holds before it is known counts too.
        for slot in &greedy {
            slot.greeted();
            assert!(slot.hold(3));
            slot.known("greedy");
        }
        let others: Vec<_> = (0..4).map(|_| slots.enter()).collect();
        others[0].known("modest");
        assert!(others[0].hold(1) && closed(&greedy) == 1, "another known client");
        others[1..].iter().for_each(Slot::greeted);
        assert!(others[1].hold(2) && others[2].hold(1) && closed(&greedy) == 2, "strangers");
        assert!(
            !greedy[3].hold(9) && closed(&greedy[3..]) == 0,
            "its own call is refused, and the rest goes on"
        );
        assert!(others[1].hold(2) && closed(&greedy) == 2 && closed(&others) == 0);
        assert!(others[3].hold(1) && closed(&greedy) == 3 && closed(&others) == 0);
        // They have no more than half, and strangers share the other.
        assert!(others[3].hold(2) && others[2].hold(1) && closed(&greedy) == 3 && closed(&others[1..2]) == 1);
        assert_eq!(slots.taken.lock().unknown, 9);
    }
}
