//! Writes lines into a buffer of cells: never outside of it, never half a number.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use crate::cli::top::text;

/// Whether colours may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli::top) struct Paint {
    pub(in crate::cli::top) colours: bool,
}

/// How something looks. Everything that matters is a word as well: colours are only seen by some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli::top) enum Ink {
    Plain,
    /// Headings.
    Strong,
    /// Less important, or no longer true.
    Faint,
    /// Pinned, likely or certain.
    Alarm,
    /// Possible, overdue, lost.
    Doubt,
    /// The picture is old.
    Notice,
}

impl Paint {
    fn style(self, ink: Ink) -> Style {
        let colour = |c: Color| if self.colours { Style::new().fg(c) } else { Style::new() };
        match ink {
            Ink::Plain => Style::new(),
            Ink::Strong => Style::new().add_modifier(Modifier::BOLD),
            Ink::Faint => Style::new().add_modifier(Modifier::DIM),
            Ink::Alarm => colour(Color::Red).add_modifier(Modifier::BOLD),
            Ink::Doubt => colour(Color::Yellow),
            Ink::Notice => colour(Color::Yellow).add_modifier(Modifier::REVERSED | Modifier::BOLD),
        }
    }
}

/// A part of a line.
pub(in crate::cli::top) type Part = (String, Ink);

/// The area that is drawn on.
pub(super) struct Pen<'a> {
    pub(super) buffer: &'a mut Buffer,
    pub(super) area: Rect,
    pub(super) paint: Paint,
}

impl Pen<'_> {
    pub(super) fn width(&self) -> usize {
        usize::from(self.area.width)
    }

    pub(super) fn height(&self) -> usize {
        usize::from(self.area.height)
    }

    /// Writes at most `room` cells from column `x` of line `y`, both counted from the corner of the area.
    pub(super) fn put(&mut self, x: usize, y: usize, room: usize, s: &str, ink: Ink) {
        let room = room.min(self.width().saturating_sub(x));
        if room == 0 || y >= self.height() {
            return;
        }
        let at = |from: u16, by: usize| u16::try_from(by).ok().and_then(|by| from.checked_add(by));
        let (Some(x), Some(y)) = (at(self.area.x, x), at(self.area.y, y)) else { return };
        self.buffer.set_stringn(x, y, text::cut(s, room), room, self.paint.style(ink));
    }

    /// Writes a line.
    pub(super) fn line(&mut self, y: usize, s: &str, ink: Ink) {
        self.put(0, y, self.width(), s, ink);
    }

    /// Writes those of the parts that fit as a whole, in order, with something between them. The first is cut rather than left out.
    pub(super) fn parts(&mut self, y: usize, parts: &[Part], between: &str) {
        let mut x = 0;
        for (n, (s, ink)) in parts.iter().enumerate() {
            let gap = if n == 0 { 0 } else { text::width(between) };
            if n > 0 && x + gap + text::width(s) > self.width() {
                return;
            }
            if n > 0 {
                self.put(x, y, gap, between, Ink::Faint);
            }
            self.put(x + gap, y, self.width(), s, *ink);
            x += gap + text::width(s);
        }
    }

    /// Writes at the right end of a line.
    pub(super) fn right(&mut self, y: usize, s: &str, ink: Ink) {
        let width = text::width(s);
        self.put(self.width().saturating_sub(width), y, width, s, ink);
    }

    /// A rule with a title.
    pub(super) fn rule(&mut self, y: usize, title: &str) {
        self.line(y, &"─".repeat(self.width()), Ink::Faint);
        if !title.is_empty() {
            let title = format!(" {title} ");
            self.put(2, y, self.width().saturating_sub(4), &title, Ink::Strong);
        }
    }

    /// Turns a line into that of the cursor.
    pub(super) fn mark(&mut self, y: usize) {
        if let (true, Ok(by)) = (y < self.height(), u16::try_from(y)) {
            let line = Rect { y: self.area.y.saturating_add(by), height: 1, ..self.area };
            self.buffer.set_style(line, Style::new().add_modifier(Modifier::REVERSED));
        }
    }

    /// Makes everything faint, for a picture that is old.
    pub(super) fn fade(&mut self, from: usize) {
        if let (true, Ok(by)) = (from < self.height(), u16::try_from(from)) {
            let y = self.area.y.saturating_add(by);
            let rest = Rect { y, height: self.area.height.saturating_sub(by), ..self.area };
            self.buffer.set_style(rest, Style::new().add_modifier(Modifier::DIM));
        }
    }
}
