//! When certificates and their authorities (CAs) change: pure decisions over what is kept in a Secret.
//!
//! An object that clients read names the authorities. A client that read it at any time in the last `overlap` must be able to connect. So the
//! object names a new authority for that long before anything is signed by it, and the one before for that long after.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::issue::{Authority, Leaf, signed};

/// How long things live.
#[derive(Clone, Copy, Debug)]
pub struct Lifetimes {
    /// Of an authority.
    pub authority: Duration,
    /// Of a serving certificate.
    pub leaf: Duration,
    /// How long the object names an authority before and after it is in use.
    pub overlap: Duration,
}

/// What the Secret keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Signs.
    pub current: Authority,
    /// Will sign, and is named by the object already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<Announced>,
    /// Signed, and is still named by the object: certificates in PEM, without keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub former: Option<Former>,
    /// What the servers show.
    pub leaf: Leaf,
}

/// An authority that is to sign later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// It.
    pub authority: Authority,
    /// Since when the object names it.
    pub since: Timestamp,
}

/// Authorities of the past.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Former {
    /// Their certificates, in PEM.
    pub certificates: String,
    /// Until when the object names them.
    pub until: Timestamp,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make an authority and let the object name it.
    Announce,
    /// Sign with the announced authority from now on.
    Promote,
    /// Let the object name the former authority no more.
    Forget,
    /// Make a serving certificate.
    Renew,
}

impl State {
    /// What is due at `now` for servers with the names `hosts`; the most important first.
    pub(super) fn due(&self, now: Timestamp, lifetimes: &Lifetimes, hosts: &[String]) -> Option<Step> {
        if self.former.as_ref().is_some_and(|former| former.until <= now) {
            return Some(Step::Forget);
        }
        match &self.next {
            // The place of the former one must be free: two hand-overs at once would push the first out too early.
            Some(next) if next.since + signed(lifetimes.overlap) <= now && self.former.is_none() => {
                return Some(Step::Promote);
            }
            None if self.current.renew <= now => return Some(Step::Announce),
            _ => {}
        }
        let is_over = self.leaf.renew.min(self.leaf.ends) <= now;
        (is_over || self.leaf.hosts != hosts).then_some(Step::Renew)
    }

    /// The first: an authority of `owner`, and a certificate with these names. `known` are the authorities of before, in PEM,
    /// that clients may go by for a while.
    pub(super) fn first(
        owner: &str,
        hosts: &[String],
        known: Option<String>,
        now: Timestamp,
        lifetimes: &Lifetimes,
    ) -> Result<Self, rcgen::Error> {
        let current = Authority::new(owner, now, lifetimes.authority)?;
        let leaf = current.issue(owner, hosts, now, lifetimes.leaf)?;
        let until = now + signed(lifetimes.overlap);
        let former = known.map(|certificates| Former { certificates, until });
        Ok(State { current, next: None, former, leaf })
    }

    /// The state after a step.
    pub(super) fn after(
        self,
        step: Step,
        owner: &str,
        hosts: &[String],
        now: Timestamp,
        lifetimes: &Lifetimes,
    ) -> Result<Self, rcgen::Error> {
        let until = now + signed(lifetimes.overlap);
        Ok(match step {
            Step::Forget => State { former: None, ..self },
            Step::Announce => {
                let authority = Authority::new(owner, now, lifetimes.authority)?;
                State { next: Some(Announced { authority, since: now }), ..self }
            }
            Step::Promote => match self.next {
                None => self,
                Some(Announced { authority, .. }) => State {
                    leaf: authority.issue(owner, hosts, now, lifetimes.leaf)?,
                    former: Some(Former { certificates: self.current.certificate, until }),
                    current: authority,
                    next: None,
                },
            },
            Step::Renew => State { leaf: self.current.issue(owner, hosts, now, lifetimes.leaf)?, ..self },
        })
    }

    /// The authorities that the object names, in PEM.
    pub fn bundle(&self) -> String {
        let mut bundle = self.current.certificate.clone();
        bundle.extend(self.next.iter().map(|next| next.authority.certificate.as_str()));
        bundle.extend(self.former.iter().map(|former| former.certificates.as_str()));
        bundle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFETIMES: Lifetimes = Lifetimes {
        authority: Duration::from_secs(900),
        leaf: Duration::from_secs(90),
        overlap: Duration::from_secs(10),
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn authority(name: &str, renew: i64) -> Authority {
        Authority { name: name.into(), certificate: name.into(), key: String::new(), renew: at(renew) }
    }

    #[test]
    fn what_is_due() {
        let hosts = vec!["a.svc".to_owned()];
        let leaf = |renew| Leaf {
            certificate: String::new(),
            key: String::new(),
            hosts: hosts.clone(),
            renew: at(renew),
            ends: at(999),
        };
        let state = |current, next: Option<i64>, former: Option<i64>, renew| State {
            current: authority("A", current),
            next: next.map(|since| Announced { authority: authority("B", 900), since: at(since) }),
            former: former.map(|until| Former { certificates: "Z".into(), until: at(until) }),
            leaf: leaf(renew),
        };
        for (state, now, due) in [
            (state(600, None, None, 60), 59, None),
            (state(600, None, None, 60), 60, Some(Step::Renew)),
            (state(600, None, None, 660), 600, Some(Step::Announce)),
            (state(600, Some(600), None, 660), 609, None),
            (state(600, Some(600), None, 660), 610, Some(Step::Promote)),
            (state(600, Some(600), None, 605), 605, Some(Step::Renew)),
            (state(600, Some(600), Some(620), 660), 615, None),
            (state(600, Some(600), Some(620), 660), 620, Some(Step::Forget)),
            (state(900, None, Some(620), 60), 619, Some(Step::Renew)),
            (state(900, None, Some(620), 60), 620, Some(Step::Forget)),
            // Whatever the date of its renewal, one that has ended is of no use.
            (state(2000, None, None, 2000), 998, None),
            (state(2000, None, None, 2000), 999, Some(Step::Renew)),
        ] {
            assert_eq!(state.due(at(now), &LIFETIMES, &hosts), due, "at {now}: {state:?}");
        }
        let moved = ["b.svc".to_owned()];
        assert_eq!(state(600, None, None, 60).due(at(0), &LIFETIMES, &moved), Some(Step::Renew));
        assert_eq!(state(600, Some(600), Some(620), 660).bundle(), "ABZ");
    }
}
