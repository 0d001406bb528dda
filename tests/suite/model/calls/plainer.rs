//! For shrinking: simpler steps that may replace a step.

use super::{Access, Call, Cut, From, Members, Mode, MountPath, NewVolume, Pages, Size, Step, Use};

const PLAIN: Use = Use { access: Access::AsMade, mode: Mode::Writer };
const BLOCK: Use = Use { access: Access::Block, mode: Mode::Writer };
const SMALL: Size = Size { required: 8 << 20, limit: 0 };

impl Step {
    /// The step with one call less, without concurrency, without a kill, or with a simpler call.
    pub fn plainer(&self) -> Vec<Step> {
        match self {
            Step::One(call) => call.plainer().into_iter().map(Step::One).collect(),
            Step::Together(calls) if calls.len() == 1 => vec![Step::One(calls[0].clone())],
            Step::Together(calls) => fewer(calls).into_iter().map(Step::Together).collect(),
            Step::Killed { calls, after } => {
                let killed = |calls| Step::Killed { calls, after: *after };
                let kinder = [Step::Crash, Step::Together(calls.clone())];
                kinder.into_iter().chain(fewer(calls).into_iter().map(killed)).collect()
            }
            Step::Crash => vec![Step::Restart],
            _ => Vec::new(),
        }
    }
}

/// The calls without one of them, or with one of them simpler.
fn fewer(calls: &[Call]) -> Vec<Vec<Call>> {
    let mut all = Vec::new();
    for (at, call) in calls.iter().enumerate() {
        if calls.len() > 1 {
            let mut fewer = calls.to_vec();
            fewer.remove(at);
            all.push(fewer);
        }
        for plainer in call.plainer() {
            let mut calls = calls.to_vec();
            calls[at] = plainer;
            all.push(calls);
        }
    }
    all
}

impl Call {
    /// The call with one parameter simpler.
    fn plainer(&self) -> Vec<Call> {
        let mut all = Vec::new();
        let mut with = |change: &dyn Fn(&mut Call)| {
            let mut call = self.clone();
            change(&mut call);
            if call != *self {
                all.push(call);
            }
        };
        let new = |change: fn(&mut NewVolume)| {
            move |call: &mut Call| {
                if let Call::CreateVolume(new) = call {
                    change(new);
                }
            }
        };
        with(&new(|new| new.from = From::Nothing));
        with(&new(|new| new.size = SMALL));
        with(&new(|new| new.uses = vec![BLOCK]));
        with(&new(|new| (new.block_size, new.tracking, new.read_ahead) = (None, None, None)));
        with(&new(|new| new.elsewhere = false));
        with(&|call| match call {
            Call::ControllerPublish { asked, .. }
            | Call::Validate { asked, .. }
            | Call::Stage { asked, .. }
            | Call::Publish { asked, .. } => *asked = PLAIN,
            Call::Expand { asked, .. } | Call::NodeExpand { asked, .. } | Call::GetCapacity { asked } => {
                *asked = None;
            }
            Call::ListVolumes(pages) | Call::ListHealth(pages) | Call::ListSnapshots { pages, .. } => {
                *pages = Pages::ALL;
            }
            Call::CreateSnapshot { style, .. } | Call::CreateGroup { style, .. } => *style = None,
            Call::DeleteGroup { members, .. } | Call::GetGroup { members, .. } => *members = Members::All,
            Call::Allocated { cut, .. } | Call::Delta { cut, .. } => *cut = Cut::WHOLE,
            _ => {}
        });
        with(&|call| match call {
            Call::ControllerPublish { read_only, .. }
            | Call::Publish { read_only, .. }
            | Call::PublishEphemeral { read_only, .. } => *read_only = false,
            Call::ListSnapshots { only, .. } => *only = None,
            _ => {}
        });
        with(&|call| match call {
            Call::Stage { at, .. } | Call::Unstage { at, .. } | Call::Unpublish { at, .. } => first(at),
            Call::Publish { at, .. } => first(at),
            Call::ListSnapshots { of, .. } => *of = None,
            _ => {}
        });
        if let Call::CreateGroup { volumes, .. } = self {
            for at in 0..volumes.len() {
                with(&|call| {
                    if let Call::CreateGroup { volumes, .. } = call {
                        volumes.remove(at);
                    }
                });
            }
        }
        all
    }
}

fn first(place: &mut MountPath) {
    match place {
        MountPath::Staging(spot) | MountPath::Target(spot) => spot.number = 0,
        MountPath::Empty => {}
    }
}
