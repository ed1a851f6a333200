//! The only place that prints: data on standard output, everything else on standard error.

use std::io::{IsTerminal, Write};

use anstyle::{AnsiColor, Style};

use super::args::{ColorChoice, OutputArgs};
use crate::wording::printable;

/// Who prints what.
#[derive(Debug, Clone)]
pub(super) struct Printer {
    quiet: bool,
    verbose: bool,
    progress: bool,
}

impl Printer {
    pub(super) fn new(output: &OutputArgs) -> Self {
        match output.color {
            ColorChoice::Auto => {}
            ColorChoice::Always => anstream::ColorChoice::Always.write_global(),
            ColorChoice::Never => anstream::ColorChoice::Never.write_global(),
        }
        let terminal = std::io::stderr().is_terminal();
        Self {
            quiet: output.quiet,
            verbose: output.verbose,
            progress: terminal && !output.no_progress && !output.quiet && !output.verbose,
        }
    }

    /// Whether a progress bar makes sense.
    pub(super) const fn shows_progress(&self) -> bool {
        self.progress
    }

    /// Whether every event is printed.
    pub(super) const fn shows_events(&self) -> bool {
        self.verbose
    }

    /// Columns for tables on standard output; none where it is no terminal, so that files and pipes
    /// get whole lines.
    pub(super) fn width() -> Option<u16> {
        if !std::io::stdout().is_terminal() {
            return None;
        }
        terminal_size::terminal_size().map(|(columns, _)| columns.0).filter(|columns| *columns >= 40)
    }

    /// Data. `Err` only if the reader is there but writing fails; a reader that went away (a pipe into
    /// `head`) has what it wanted.
    pub(super) fn data(text: &str) -> Result<(), std::io::Error> {
        let mut stdout = anstream::stdout().lock();
        let written = stdout
            .write_all(text.as_bytes())
            .and_then(|()| if text.ends_with('\n') { Ok(()) } else { stdout.write_all(b"\n") })
            .and_then(|()| stdout.flush());
        match written {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }

    /// Something worth knowing.
    pub(super) fn notice(&self, text: &str) {
        if !self.quiet {
            Self::stderr("note", AnsiColor::Cyan, text);
        }
    }

    /// Something that must be on record, however quiet the user likes it.
    pub(super) fn warning(text: &str) {
        Self::stderr("warning", AnsiColor::Yellow, text);
    }

    /// A line of the event stream.
    pub(super) fn event(&self, text: &str) {
        if self.verbose {
            let mut stderr = anstream::stderr().lock();
            // Nobody is left to tell when standard error is gone.
            let _ = writeln!(stderr, "{text}");
        }
    }

    /// An error, and what to do about it.
    pub(super) fn error(text: &str, hint: Option<&str>) {
        Self::stderr("error", AnsiColor::Red, text);
        if let Some(hint) = hint {
            Self::stderr("hint", AnsiColor::Green, hint);
        }
    }

    fn stderr(word: &str, color: AnsiColor, text: &str) {
        let style = Style::new().bold().fg_color(Some(color.into()));
        let mut stderr = anstream::stderr().lock();
        // The word says it all; colour only helps the eye. Nobody is left to tell on failure.
        let _ = writeln!(stderr, "{style}{word}{style:#}: {}", harmless(text));
    }
}

/// Text for a terminal, line breaks and all: what comes from files may neither move the cursor nor turn the direction.
fn harmless(text: &str) -> String {
    text.split('\n').map(|line| printable(line, usize::MAX)).collect::<Vec<_>>().join("\n")
}
