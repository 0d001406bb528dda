//! How a fault is written: `name:key=value,key=value`, several joined by `;` or a line each. The same on the command
//! line, in a file, over HTTP and in a request's own marker.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use base::Quantity;
use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::Code;

use super::catalog::{CATALOG, CONNECTION, Entry, Kind, LIMITS, find};

/// A fault as it was asked for.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub entry: &'static Entry,
    pub values: Values,
    pub limits: Limits,
    text: String,
}

/// The values of a fault; those that it does not take are not looked at.
#[derive(Clone, Debug)]
pub(super) struct Values {
    pub after: u64,
    pub bytes: u64,
    pub code: Code,
    pub from: Code,
    pub ms: u64,
    pub of: u64,
    pub percent: u64,
    pub size: u64,
    pub times: u64,
    pub value: String,
}

/// Which calls meet it.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    /// Empty: those that the catalogue says.
    pub calls: Vec<String>,
    pub snapshot: Option<String>,
    pub account: Option<String>,
    pub when: Option<When>,
    pub nth: Option<u64>,
    pub first: Option<u64>,
    pub every: Option<u64>,
    pub share: Option<f64>,
}

/// Which streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Whole,
    Resumed,
    Unaligned,
    NegativeBound,
}

/// Why a text is not a fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SpecError {
    #[error("{0:?} names no fault: write one a line, as in cut:after=3")]
    None(String),
    #[error("there is no fault {name:?}{}: `cbt-lab faults --list` names them", near(.name))]
    Name { name: String },
    #[error("{pair:?} in {text:?} is not key=value")]
    Pair { pair: String, text: String },
    #[error("{fault} takes no {key:?}: it takes {}", keys(.fault))]
    Key { fault: &'static str, key: String },
    #[error("{value:?} is wrong for {key} of {fault}: {wanted}")]
    Value { fault: &'static str, key: String, value: String, wanted: &'static str },
    #[error("{fault} is about connections, not calls: it takes no {key}")]
    Connection { fault: &'static str, key: String },
}

fn near(name: &str) -> String {
    let close = |entry: &&Entry| entry.name.contains(name) || name.contains(entry.name);
    match CATALOG.iter().find(close) {
        Some(entry) if !name.is_empty() => format!(" (there is {})", entry.name),
        _ => String::new(),
    }
}

fn keys(fault: &str) -> String {
    let own = find(fault).map_or(&[][..], |entry| entry.takes);
    let limits = LIMITS.iter().map(|(name, _)| *name);
    own.iter().map(|(name, _)| *name).chain(limits).collect::<Vec<_>>().join(", ")
}

/// A code as the spec writes it.
fn code(text: &str) -> Option<Code> {
    (0..=16).map(Code::from_i32).find(|code| crate::code::name(*code).eq_ignore_ascii_case(text))
}

const A_CODE: &str = "write a gRPC code, as in NOT_FOUND";
const A_NUMBER: &str = "write a number of 1 or more";
/// All calls of CSI, as its contract has them. The two of the Kubernetes API have names of its.
static CALLS: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    let files = FileDescriptorSet::decode(proto::FILE_DESCRIPTOR_SET).map(|set| set.file).unwrap_or_default();
    let services = files.into_iter().flat_map(|file| file.service);
    services.flat_map(|service| service.method).filter_map(|method| method.name).collect()
});
static A_CALL: LazyLock<String> = LazyLock::new(|| {
    let calls: Vec<&str> = CALLS.iter().map(String::as_str).collect();
    format!("write * or the name of a call, which are {}", calls.join(", "))
});

impl Values {
    fn none() -> Self {
        Values {
            after: 0,
            bytes: 0,
            code: Code::Unavailable,
            from: Code::NotFound,
            ms: 0,
            of: 1,
            percent: 0,
            size: 0,
            times: 0,
            value: String::new(),
        }
    }

    /// Sets a value; an error says what it has to be.
    fn set(&mut self, key: &str, text: &str) -> Result<(), &'static str> {
        let number = || text.parse::<u64>().map_err(|_| "write a whole number");
        let size = || text.parse::<Quantity>().map(|size| size.0).map_err(|_| "write a size, as in 4Ki");
        match key {
            "after" => self.after = number()?,
            "bytes" => self.bytes = size()?,
            "code" => self.code = code(text).ok_or(A_CODE)?,
            "from" => {
                self.from =
                    code(text).filter(|code| *code != Code::Ok).ok_or("write the gRPC code of an error")?
            }
            "ms" => self.ms = number()?,
            "of" => self.of = number().ok().filter(|of| *of > 0).ok_or(A_NUMBER)?,
            "percent" => {
                self.percent =
                    number().ok().filter(|percent| *percent <= 100).ok_or("write a number of 0 to 100")?;
            }
            "size" => {
                self.size = size()
                    .ok()
                    .filter(|size| (1..=1 << 40).contains(size))
                    .ok_or("write a size, as in 4Ki")?
            }
            "times" => self.times = number()?,
            _ => self.value = text.to_owned(),
        }
        Ok(())
    }
}

impl Limits {
    /// Sets a limit; `None` where there is none of that name.
    fn set(&mut self, key: &str, text: &str) -> Option<Result<(), &'static str>> {
        let number = || text.parse::<u64>().ok().filter(|number| *number > 0).ok_or(A_NUMBER);
        let set = match key {
            "call" => {
                self.calls = text.split('+').map(str::to_owned).collect();
                self.calls
                    .iter()
                    .all(|call| call == "*" || CALLS.contains(call))
                    .then_some(())
                    .ok_or(A_CALL.as_str())
            }
            "snapshot" => {
                self.snapshot = Some(text.to_owned());
                Ok(())
            }
            "account" => {
                self.account = Some(text.to_owned());
                Ok(())
            }
            "when" => {
                self.when = match text {
                    "whole" => Some(When::Whole),
                    "resumed" => Some(When::Resumed),
                    "unaligned" => Some(When::Unaligned),
                    "negative" => Some(When::NegativeBound),
                    _ => None,
                };
                self.when.map(drop).ok_or("write whole, resumed, unaligned or negative")
            }
            "nth" => number().map(|number| self.nth = Some(number)),
            "first" => number().map(|number| self.first = Some(number)),
            "every" => number().map(|number| self.every = Some(number)),
            "share" => text
                .parse()
                .ok()
                .filter(|share| (0.0..=1.0).contains(share))
                .map(|share| self.share = Some(share))
                .ok_or("write a share from 0 to 1"),
            _ => return None,
        };
        Some(set)
    }
}

impl Spec {
    /// Whether calls of that name meet it.
    pub fn is_for(&self, call: &str) -> bool {
        let is = |name: &str| name == "*" || name == call;
        match self.limits.calls.is_empty() {
            true => self.entry.calls.iter().any(|name| is(name)),
            false => self.limits.calls.iter().any(|name| is(name)),
        }
    }
}

impl FromStr for Spec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let text = text.trim();
        let (name, pairs) = text.split_once(':').unwrap_or((text, ""));
        let entry = find(name).ok_or_else(|| SpecError::Name { name: name.to_owned() })?;
        let (mut values, mut limits) = (Values::none(), Limits::default());
        for (key, default) in entry.takes {
            values.set(key, default).map_err(|wanted| wrong(entry, key, default, wanted))?;
        }
        for pair in pairs.split(',').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| SpecError::Pair { pair: pair.to_owned(), text: text.to_owned() })?;
            let set = match entry.takes.iter().any(|(name, _)| *name == key) {
                true => values.set(key, value),
                false => {
                    let set = limits
                        .set(key, value)
                        .ok_or_else(|| SpecError::Key { fault: entry.name, key: key.to_owned() })?;
                    if entry.calls == CONNECTION {
                        return Err(SpecError::Connection { fault: entry.name, key: key.to_owned() });
                    }
                    set
                }
            };
            set.map_err(|wanted| wrong(entry, key, value, wanted))?;
        }
        let takes_code = entry.takes.iter().any(|(key, _)| *key == "code");
        if takes_code && values.code == Code::Ok && !matches!(entry.kind, Kind::Cut | Kind::ErrorBecomes) {
            return Err(wrong(entry, "code", "OK", "write the gRPC code of an error"));
        }
        Ok(Spec { entry, values, limits, text: text.to_owned() })
    }
}

fn wrong(entry: &'static Entry, key: &str, value: &str, wanted: &'static str) -> SpecError {
    SpecError::Value { fault: entry.name, key: key.to_owned(), value: value.to_owned(), wanted }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The same of a text that is to name a fault. One that names none would have no effect, which no one asks for.
pub(super) fn parse_some(text: &str) -> Result<Vec<Spec>, SpecError> {
    match parse_all(text)? {
        specs if specs.is_empty() => Err(SpecError::None(text.to_owned())),
        specs => Ok(specs),
    }
}

/// Reads faults that are joined by `;`, or a line each. A `#` starts a comment.
pub(super) fn parse_all(text: &str) -> Result<Vec<Spec>, SpecError> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or(""));
    lines
        .flat_map(|line| line.split(';'))
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(str::parse)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_one_that_can_be_written() {
        for entry in CATALOG {
            let given: Vec<String> =
                entry.takes.iter().map(|(key, value)| format!("{key}={value}")).collect();
            let text = format!("{}:{}", entry.name, given.join(","));
            let (bare, given): (Spec, Spec) =
                (entry.name.parse().expect("bare"), text.parse().expect("given"));
            assert_eq!(format!("{:?}", bare.values), format!("{:?}", given.values), "{text}");
            assert_eq!(given.to_string(), text);
        }
    }

    #[test]
    fn values_and_limits_are_read() {
        let spec: Spec =
            "cut:after=3,code=OK,nth=2,call=GetMetadataDelta,when=resumed".parse().expect("a fault");
        assert_eq!((spec.values.after, spec.values.code), (3, Code::Ok));
        assert_eq!((spec.limits.nth, spec.limits.when), (Some(2), Some(When::Resumed)));
        assert!(spec.is_for("GetMetadataDelta") && !spec.is_for("GetMetadataAllocated"));
        let spec: Spec = "delay:ms=5,call=CreateSnapshot+DeleteSnapshot".parse().expect("a fault");
        assert!(spec.is_for("CreateSnapshot") && spec.is_for("DeleteSnapshot") && !spec.is_for("Probe"));
        let spec: Spec = "huge-messages:size=6Mi".parse().expect("a fault");
        assert_eq!(spec.values.size, 6 << 20);
        let all = parse_all("cut; # the first\n\n stall:first=1 # the second\n").expect("two");
        assert_eq!(all.iter().map(|spec| spec.entry.name).collect::<Vec<_>>(), ["cut", "stall"]);
    }

    #[test]
    fn what_is_no_fault_says_why() {
        for (text, part) in [
            ("cutt", "there is cut"),
            ("", "--list"),
            ("cut:after", "key=value"),
            ("cut:ms=3", "it takes after, bytes, code, call"),
            ("cut:after=-1", "whole number"),
            ("cut:code=TEAPOT", "as in NOT_FOUND"),
            ("cut:nth=0", "1 or more"),
            ("cut:share=2", "from 0 to 1"),
            ("cut:share=NaN", "from 0 to 1"),
            ("cut:when=never", "whole, resumed"),
            ("cut:call=Get Metadata", "name of a call"),
            ("cut:call=GetMetadatDelta", ", GetMetadataDelta, "),
            ("cut:call=Probe+", "name of a call"),
            ("lose-share:percent=101", "0 to 100"),
            ("error-becomes:from=OK", "of an error"),
            ("burst:of=0", "1 or more"),
            ("refuse:code=OK", "of an error"),
            ("tls-expired:nth=1", "about connections"),
        ] {
            let error = text.parse::<Spec>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
