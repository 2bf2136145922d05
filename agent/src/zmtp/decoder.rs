//! The decoder of one direction: greeting, frames, commands, messages; out of step and back in.
//!
//! Pure: no I/O, no clock. A whole message in one call is handed on without being copied; only what is
//! unfinished at a call's end is stored, within the caps of [`super::multipart`].

use super::acquire::{self, COMMAND, Grammar, Header, MORE, Malformed, Parsed, Recognition, Start};
use super::greeting::{self, GREETING_LEN, Greeting, SocketType, Unsupported};
use super::multipart::{BYTES_KEPT, FRAMES_KEPT, FrameMeta, Frames, Multipart};

/// How far the position in the stream is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confidence {
    /// Nothing known yet.
    Pending,
    /// Followed from its greeting.
    Known,
    /// Joined in its middle at a known message.
    Acquired,
    /// Was known or acquired; a hole or malformed bytes ended that.
    Lost,
}

/// What a stream says.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A whole message; its last byte lies just before byte `behind` of the call (or skip) at hand.
    Message {
        /// Its frames.
        parts: Multipart<'a>,
        /// Bytes of the call at hand up to its end.
        behind: u32,
    },
    /// A whole greeting: the stream is followed from its beginning.
    Greeting,
    /// The peer that sends on this stream says what it is.
    Ready(SocketType),
    /// A command other than READY (PING, PONG, ERROR, …).
    Command,
    /// The stream was out of step and is in step again, or was joined in its middle.
    Acquired,
    /// A dialect that is not read: the stream is not followed any more.
    Unsupported(Unsupported),
    /// Not ZMTP: the stream is not followed any more.
    NotZmtp,
    /// Bytes that no ZMTP stream has: out of step.
    Malformed,
}

/// The stream is out of step: the position of the next frame is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Its first 64 bytes.
    Greeting,
    /// Position not known.
    Search,
    /// In step (or on trial, while `proven` is false).
    Frames,
    /// Not followed.
    Dead,
}

/// A frame whose header is here and whose body is not all here.
#[derive(Clone, Copy, Debug)]
struct Current {
    flags: u8,
    /// Bytes of its body to come.
    remaining: u64,
    /// Where its kept bytes begin in the store.
    at: usize,
    /// Whether its next byte is still one that is kept.
    keeping: bool,
}

/// Decoder of one direction of one connection.
#[derive(Clone, Debug)]
pub struct Decoder {
    phase: Phase,
    confidence: Confidence,
    /// A greeting or a known message stands behind the position; without it nothing is handed on.
    proven: bool,
    /// The frame whose body comes next; `None` between frames.
    frame: Option<Current>,
    /// Header bytes of the next frame so far.
    head: [u8; 9],
    head_len: u8,
    /// The message at hand: bytes kept (of a greeting too), frames, and how many there were.
    store: Vec<u8>,
    frames: Vec<FrameMeta>,
    total: u32,
    /// The stream was followed from its first byte, so what is no greeting there is not ZMTP.
    from_start: bool,
    /// Its next byte begins a message, as far as the kernel can tell.
    expected: bool,
    /// Bytes of earlier calls taken on trial.
    trial: u64,
    /// Bytes passed over while out of step.
    unsynced: u64,
}

/// No frame of a message that is still to prove the position is longer: 64 MiB, 16 million pages.
const TRIAL_FRAME_MAX: u64 = 64 << 20;

/// A trial is not doubted before so many bytes: REGISTER has up to 10 KiB.
const TRIAL_PATIENCE: u64 = 16 << 10;

/// Capacity that an idle decoder may keep: enough for any message but REGISTER.
const STORE_IDLE: usize = 1024;

impl Decoder {
    /// For a stream whose first byte comes next.
    pub const fn at_start() -> Self {
        Self {
            phase: Phase::Greeting,
            confidence: Confidence::Pending,
            proven: false,
            frame: None,
            head: [0; 9],
            head_len: 0,
            store: Vec::new(),
            frames: Vec::new(),
            total: 0,
            from_start: true,
            expected: false,
            trial: 0,
            unsynced: 0,
        }
    }

    /// For a stream joined in its middle.
    pub const fn joined() -> Self {
        let mut decoder = Self::at_start();
        decoder.phase = Phase::Search;
        decoder.from_start = false;
        decoder
    }

    /// For a stream that goes on where another decoder, which was in step at the end of a message, has left it.
    pub const fn resumed(confidence: Confidence) -> Self {
        let mut decoder = Self::at_start();
        decoder.phase = Phase::Frames;
        decoder.confidence = confidence;
        decoder.proven = true;
        decoder.from_start = false;
        decoder
    }

    /// For a stream that another decoder has read, and that is out of step now.
    pub const fn resumed_lost() -> Self {
        let mut decoder = Self::joined();
        decoder.confidence = Confidence::Lost;
        decoder
    }

    /// Whether the stream is in step and no message is under way.
    pub const fn is_between_messages(&self) -> bool {
        self.proven && matches!(self.phase, Phase::Frames) && self.at_boundary()
    }

    /// Says that the next byte begins a message, as far as the kernel can tell: even one that could be the tail
    /// of another is believed there. Without effect on a stream that is in step.
    pub const fn expect_message(&mut self) {
        self.expected = !self.proven;
    }

    /// How far the position is known.
    pub const fn confidence(&self) -> Confidence {
        self.confidence
    }

    /// Whether the stream was given up (not ZMTP, or a dialect that is not read).
    pub const fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead)
    }

    /// Whether no byte has come since the stream began.
    pub const fn is_untouched(&self) -> bool {
        matches!(self.phase, Phase::Greeting) && self.store.is_empty()
    }

    /// Whether the greeting is not yet complete.
    pub const fn in_greeting(&self) -> bool {
        matches!(self.phase, Phase::Greeting)
    }

    /// Whether a message (or what may be one) is partly here.
    pub const fn is_unfinished(&self) -> bool {
        matches!(self.phase, Phase::Frames) && !self.at_boundary()
    }

    /// Bytes passed over while out of step since the last call of this.
    pub const fn take_unsynced(&mut self) -> u64 {
        std::mem::replace(&mut self.unsynced, 0)
    }

    /// Memory held for unfinished messages, in bytes.
    pub const fn held(&self) -> usize {
        self.store.capacity() + self.frames.capacity() * size_of::<FrameMeta>()
    }

    /// Ends the following of this stream and frees what it held.
    pub fn kill(&mut self) {
        *self = Self { phase: Phase::Dead, ..Self::at_start() };
    }

    /// Takes the bytes of one call.
    pub fn feed(&mut self, bytes: &[u8], grammar: &Grammar, on: &mut impl FnMut(Event<'_>)) {
        self.leave_doubtful_trial(bytes, grammar);
        // A trial that began in an earlier call has not yet tried this call's first byte.
        let mut retry = 0;
        let mut at = 0;
        while at < bytes.len() {
            at = match self.phase {
                Phase::Dead => return,
                Phase::Greeting => match self.greet(bytes, at, on) {
                    Ok(at) => at,
                    Err(at) => self.fall_out(at, on),
                },
                Phase::Search => {
                    let from = if at == 0 { retry } else { at };
                    retry = 1;
                    self.search(bytes, from, grammar, on)
                }
                Phase::Frames => match self.read_frames(bytes, at, grammar, on) {
                    Ok(at) => at,
                    Err(at) => self.fall_out(at, on),
                },
            };
        }
        if self.on_trial() {
            self.trial = self.trial.saturating_add(wide(bytes.len()));
        }
    }

    const fn on_trial(&self) -> bool {
        !self.proven && !self.from_start && matches!(self.phase, Phase::Frames | Phase::Greeting)
    }

    /// Passes over `len` bytes that are not here, as part of one call or as a hole.
    ///
    /// # Errors
    /// [`Lost`] when they do not all lie inside the body of one frame: the stream is out of step then.
    pub fn skip(&mut self, len: u64, grammar: &Grammar, on: &mut impl FnMut(Event<'_>)) -> Result<(), Lost> {
        if self.phase == Phase::Dead {
            return Ok(());
        }
        if let Some(frame) = self.frame.as_mut().filter(|f| f.remaining >= len) {
            frame.keeping = false;
            frame.remaining -= len;
            let frame = *frame;
            if frame.remaining > 0 || self.end_frame(frame, len, grammar, on).is_ok() {
                return Ok(());
            }
        }
        self.lose();
        self.unsynced = self.unsynced.saturating_add(len);
        Err(Lost)
    }

    /// Gives the position up.
    pub fn lose(&mut self) {
        if self.phase == Phase::Dead {
            return;
        }
        if self.proven {
            self.confidence = Confidence::Lost;
        }
        self.unsynced = self.unsynced.saturating_add(std::mem::take(&mut self.trial));
        self.from_start = false;
        self.expected = false;
        self.phase = Phase::Search;
        self.proven = false;
        self.frame = None;
        self.head_len = 0;
        self.total = 0;
        self.store = Vec::new();
        self.frames = Vec::new();
    }

    fn fall_out(&mut self, at: usize, on: &mut impl FnMut(Event<'_>)) -> usize {
        let was_proven = self.proven;
        self.lose();
        if was_proven {
            on(Event::Malformed);
            at
        } else {
            // Only a trial failed: look at this call again.
            0
        }
    }

    /// Takes bytes of a greeting. `Err`: on trial, and it is none.
    fn greet(&mut self, bytes: &[u8], at: usize, on: &mut impl FnMut(Event<'_>)) -> Result<usize, usize> {
        let want = GREETING_LEN.saturating_sub(self.store.len());
        let rest = bytes.get(at..).unwrap_or_default();
        let part = rest.get(..want).unwrap_or(rest);
        self.store.extend_from_slice(part);
        let behind = at.saturating_add(part.len());
        if !self.from_start && !greeting::has_libzmq_signature(&self.store) {
            return Err(behind);
        }
        match greeting::judge(&self.store) {
            Greeting::More => {}
            Greeting::Null => {
                self.clear_message();
                self.phase = Phase::Frames;
                self.proven = true;
                self.trial = 0;
                self.confidence = Confidence::Known;
                on(Event::Greeting);
            }
            Greeting::Unsupported(dialect) => {
                self.kill();
                on(Event::Unsupported(dialect));
            }
            Greeting::NotZmtp => {
                self.kill();
                on(Event::NotZmtp);
            }
        }
        Ok(behind)
    }

    fn search(
        &mut self,
        bytes: &[u8],
        from: usize,
        grammar: &Grammar,
        on: &mut impl FnMut(Event<'_>),
    ) -> usize {
        if from == 0 && self.confidence == Confidence::Pending {
            // No frame begins with 0xff: this can only be a greeting.
            if bytes.first() == Some(&0xff) {
                self.phase = Phase::Greeting;
                return 0;
            }
            if acquire::is_http(bytes) {
                self.kill();
                on(Event::NotZmtp);
                return bytes.len();
            }
        }
        let expected = self.expected;
        match acquire::find(bytes, from, expected, grammar) {
            Start::Sure(at) => {
                self.pass_over(at.saturating_sub(from));
                self.phase = Phase::Frames;
                self.prove(on);
                at
            }
            Start::Maybe => {
                self.phase = Phase::Frames;
                0
            }
            Start::Nowhere => {
                self.expected = false;
                self.pass_over(bytes.len().saturating_sub(from));
                bytes.len()
            }
        }
    }

    fn pass_over(&mut self, len: usize) {
        self.unsynced = self.unsynced.saturating_add(wide(len));
    }

    fn prove(&mut self, on: &mut impl FnMut(Event<'_>)) {
        self.proven = true;
        self.expected = false;
        self.trial = 0;
        self.confidence = Confidence::Acquired;
        on(Event::Acquired);
    }

    /// A trial may hang in a body that is none. When it has lasted longer than any message but one with a
    /// large index, a whole known message at a call's start ends it.
    fn leave_doubtful_trial(&mut self, bytes: &[u8], grammar: &Grammar) {
        if self.trial > TRIAL_PATIENCE && acquire::find_at_start(bytes, false, grammar) == Start::Sure(0) {
            self.lose();
        }
    }

    /// Reads frames from `at` on. `Err(at)`: no frame can begin there, or a trial has failed.
    fn read_frames(
        &mut self,
        bytes: &[u8],
        mut at: usize,
        grammar: &Grammar,
        on: &mut impl FnMut(Event<'_>),
    ) -> Result<usize, usize> {
        let mut frames = Frames::new();
        while at < bytes.len() {
            if self.at_boundary() {
                match acquire::parse(bytes, at, &mut frames) {
                    Ok(Parsed::Message { behind, total }) => {
                        let parts = Multipart::in_call(bytes, &frames, total);
                        self.admit(&parts, grammar, on).map_err(|_| at)?;
                        on(Event::Message { parts, behind: u32::try_from(behind).unwrap_or(u32::MAX) });
                        at = behind;
                        continue;
                    }
                    Ok(Parsed::Command { body, behind }) => {
                        say_command(bytes.get(body..behind).unwrap_or_default(), on);
                        at = behind;
                        continue;
                    }
                    Ok(Parsed::Partial) => {}
                    Err(Malformed) => return Err(at),
                }
            }
            at = self.step(bytes, at, grammar, on)?;
        }
        Ok(at)
    }

    const fn at_boundary(&self) -> bool {
        self.frame.is_none() && self.head_len == 0 && self.total == 0
    }

    /// Takes header bytes or body bytes of the frame at hand.
    fn step(
        &mut self,
        bytes: &[u8],
        at: usize,
        grammar: &Grammar,
        on: &mut impl FnMut(Event<'_>),
    ) -> Result<usize, usize> {
        let rest = bytes.get(at..).unwrap_or_default();
        if let Some(frame) = self.frame {
            let here = usize::try_from(frame.remaining).unwrap_or(usize::MAX).min(rest.len());
            self.take_body(frame, rest.get(..here).unwrap_or_default());
            let behind = at.saturating_add(here);
            if let Some(frame) = self.frame.filter(|f| f.remaining == 0) {
                self.end_frame(frame, wide(behind), grammar, on).map_err(|_| behind)?;
            }
            return Ok(behind);
        }
        let Some(byte) = rest.first() else { return Ok(at) };
        if let Some(slot) = self.head.get_mut(usize::from(self.head_len)) {
            *slot = *byte;
        }
        self.head_len = self.head_len.saturating_add(1);
        let behind = at.saturating_add(1);
        let head = self.head.get(..usize::from(self.head_len)).unwrap_or_default();
        let Some((header, _)) = Header::read(head).map_err(|_| at)? else { return Ok(behind) };
        if !self.proven && header.len > TRIAL_FRAME_MAX {
            return Err(behind);
        }
        let frame = self.begin_frame(header);
        if header.len == 0 {
            self.end_frame(frame, wide(behind), grammar, on).map_err(|_| behind)?;
        }
        Ok(behind)
    }

    fn begin_frame(&mut self, header: Header) -> Current {
        self.head_len = 0;
        let mut frame =
            Current { flags: header.flags, remaining: header.len, at: self.store.len(), keeping: true };
        if header.flags & COMMAND == 0 {
            self.total = self.total.saturating_add(1);
            if self.frames.len() < FRAMES_KEPT {
                let at = u32::try_from(frame.at).unwrap_or(u32::MAX);
                self.frames.push(FrameMeta { at, kept: 0, len: header.len });
            } else {
                frame.keeping = false;
            }
        }
        self.frame = Some(frame);
        frame
    }

    /// Takes a piece of a frame's body and stores what is kept of it.
    fn take_body(&mut self, mut frame: Current, piece: &[u8]) {
        if frame.keeping {
            let room = BYTES_KEPT.saturating_sub(self.store.len().saturating_sub(frame.at));
            let part = piece.get(..room).unwrap_or(piece);
            self.store.extend_from_slice(part);
            if frame.flags & COMMAND == 0
                && let Some(meta) = self.frames.last_mut()
            {
                meta.kept = meta.kept.saturating_add(u16::try_from(part.len()).unwrap_or(u16::MAX));
            }
        }
        frame.remaining = frame.remaining.saturating_sub(wide(piece.len()));
        self.frame = Some(frame);
    }

    /// Ends the frame at hand, and with its last frame the message. `Err`: a trial has failed.
    fn end_frame(
        &mut self,
        frame: Current,
        behind: u64,
        grammar: &Grammar,
        on: &mut impl FnMut(Event<'_>),
    ) -> Result<(), Lost> {
        self.frame = None;
        if frame.flags & COMMAND != 0 {
            say_command(self.store.get(frame.at..).unwrap_or_default(), on);
            self.store.truncate(frame.at);
            return Ok(());
        }
        if !self.proven && self.total == 1 && !(grammar.may_begin)(&self.store) {
            return Err(Lost);
        }
        if frame.flags & MORE != 0 {
            return Ok(());
        }
        // The message borrows the store while the decoder is told about it.
        let store = std::mem::take(&mut self.store);
        let frames = std::mem::take(&mut self.frames);
        let parts = Multipart::new(&store, &frames, self.total);
        let admitted = self.admit(&parts, grammar, on);
        if admitted.is_ok() {
            on(Event::Message { parts, behind: u32::try_from(behind).unwrap_or(u32::MAX) });
        }
        self.store = store;
        self.frames = frames;
        self.clear_message();
        admitted
    }

    /// Lets a message pass where the position is proven, or lets it prove the position.
    fn admit(
        &mut self,
        parts: &Multipart<'_>,
        grammar: &Grammar,
        on: &mut impl FnMut(Event<'_>),
    ) -> Result<(), Lost> {
        if self.proven {
            return Ok(());
        }
        let least = if self.expected { Recognition::Weak } else { Recognition::Plain };
        if (grammar.recognise)(parts) < least {
            return Err(Lost);
        }
        self.prove(on);
        Ok(())
    }

    fn clear_message(&mut self) {
        self.total = 0;
        self.store.clear();
        self.frames.clear();
        if self.held() > STORE_IDLE {
            self.store = Vec::new();
            self.frames = Vec::new();
        }
    }
}

fn say_command(body: &[u8], on: &mut impl FnMut(Event<'_>)) {
    on(greeting::ready(body).map_or(Event::Command, Event::Ready));
}

/// A length in 64 bits.
fn wide(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
