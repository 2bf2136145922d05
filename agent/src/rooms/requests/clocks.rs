//! Calls that stop and start an engine: while it stands, its clocks do.
//!
//! Pure: no I/O, no clock (time is an argument). A call counts when it is answered with 200; changing weights and changing
//! the role last from the call to its answer.

use crate::event::{Mono, SECOND};
use crate::http::event as web;
use crate::rooms::engines::{Engine, EngineId, Stop};
use crate::rooms::findings::cause;
use crate::rooms::model::{Connection, Role};
use crate::rooms::requests::LOOK_EVERY;
use crate::rooms::table::RoomTable;
use crate::verdict::explain::seconds;
use crate::verdict::model::{Action, Class, Confidence, Finding, Party};

/// An engine may stand so long before somebody should hear of it: weights of the largest models load in minutes.
const LONG_PAUSE: u64 = 600 * SECOND;

impl RoomTable {
    /// A call that stops, starts or changes an engine.
    pub(crate) fn control_call(
        &mut self,
        at: Mono,
        connection: &Connection,
        server: bool,
        call: &web::Control,
        status: Option<u16>,
    ) {
        let engine = self.engine_of(connection, server);
        let grace = self.config.floor;
        let Some(e) = self.engines.get_mut(engine) else { return };
        let done = status == Some(200);
        match call {
            web::Control::Pause(_) if done => e.stop(Stop::Pause, at),
            web::Control::Resume if done => e.start(Stop::Pause, at, grace),
            web::Control::WeightsBegin if done => e.stop(Stop::Weights, at),
            web::Control::WeightsEnd if done => e.start(Stop::Weights, at, grace),
            web::Control::MemoryRelease if done => e.stop(Stop::Memory, at),
            web::Control::MemoryResume if done => e.start(Stop::Memory, at, grace),
            web::Control::UpdateWeights if status.is_none() => e.stop(Stop::Update, at),
            web::Control::UpdateWeights => e.start(Stop::Update, at, grace),
            web::Control::RoleSwitch(_) if status.is_none() => e.stop(Stop::RoleSwitch, at),
            web::Control::RoleSwitch(new) => {
                e.start(Stop::RoleSwitch, at, grace);
                if done {
                    e.role = new.map(|n| match n {
                        web::NewRole::Prefill => Role::Prefill,
                        web::NewRole::Decode => Role::Decode,
                    });
                    // What its ranks showed before says nothing any more.
                    e.looked = Some(at.plus(LONG_PAUSE));
                }
            }
            _ => {}
        }
        self.no_longer_paused(engine, at);
    }

    /// Ends the finding of an engine that runs again.
    fn no_longer_paused(&mut self, engine: EngineId, at: Mono) {
        let Some(e) = self.engines.get_mut(engine) else { return };
        if e.told_paused && e.stopped.is_none() {
            e.told_paused = false;
            let group = paused_group(e);
            self.lower(group, at);
        }
    }

    /// What time alone brings: engines that stand for long, ranks that do not register, queries without an answer.
    pub(crate) fn look_at_http(&mut self, now: Mono) {
        if now < self.http.next_look {
            return;
        }
        self.http.next_look = now.plus(LOOK_EVERY);
        let long = |e: &Engine| e.stopped.is_some_and(|since| now.since(since) >= LONG_PAUSE);
        let changed = |e: &Engine| if e.told_paused { e.stopped.is_none() } else { long(e) };
        let due: Vec<EngineId> = self.engines.iter().filter(|(_, e)| changed(e)).map(|(id, _)| id).collect();
        for id in due {
            self.no_longer_paused(id, now);
            let Some(e) = self.engines.get_mut(id).filter(|e| e.stopped.is_some()) else { continue };
            e.told_paused = true;
            let finding = paused(e, now);
            self.raise(finding);
        }
        self.look_at_bootstraps(now);
        self.look_at_late_aborts(now);
    }
}

/// The engine as a party of a finding.
pub(crate) fn party(e: &Engine) -> Party {
    Party {
        role: e.role,
        endpoint: e.address,
        http: e.address,
        task: e.task,
        local: Some(e.task.is_some()),
        ..Party::default()
    }
}

fn name(e: &Engine) -> String {
    e.address.map_or_else(|| e.pid.map(|p| p.to_string()).unwrap_or_default(), |a| a.to_string())
}

fn paused_group(e: &Engine) -> u64 {
    cause(&[Class::EnginePaused.label(), &name(e)])
}

fn paused(e: &Engine, now: Mono) -> Finding {
    let since = e.stopped.unwrap_or(now);
    let why = e.why().unwrap_or(Stop::Pause);
    let at = e.address.map_or_else(|| "HOST:HTTP_PORT".to_owned(), |a| a.to_string());
    let undo = match why {
        Stop::Pause => Some("continue_generation"),
        Stop::Weights => Some("end_weight_update"),
        Stop::Memory => Some("resume_memory_occupation"),
        Stop::Update | Stop::RoleSwitch => None,
    };
    let actions = undo.map(|call| Action {
        command: format!("curl -sS -X POST http://{at}/{call} -H 'Content-Type: application/json' -d '{{}}'"),
        effect: "lets the engine go on; whoever stopped it may count on its standing still".to_owned(),
        blast_radius: "a weight update under way would be mixed into running requests".to_owned(),
        clears: true,
    });
    Finding {
        group: paused_group(e),
        class: Class::EnginePaused,
        confidence: Confidence::Certain,
        engine: party(e),
        rooms: Vec::new(),
        room_count: 0,
        since,
        closed_at: None,
        evidence: vec![
            format!(
                "the engine is {} for {} s and was not started again",
                why.words(),
                seconds(now.since(since))
            ),
            "its clocks stand still meanwhile: no room is called pinned for waiting on it".to_owned(),
        ],
        actions: actions.into_iter().collect(),
    }
}
