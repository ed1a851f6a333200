//! Progress bars: a listener like any other.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::printer::Printer;
use crate::campaign::News;
use crate::flow::Update;
use crate::record::{Event, JournalLine, Phase};
use crate::units::format_seconds;

/// Shows a run while it goes on.
pub(super) struct Progress {
    printer: Printer,
    bar: ProgressBar,
    blocks: u32,
    failures: u32,
}

impl Progress {
    pub(super) fn new(printer: &Printer) -> Self {
        let bar = if printer.shows_progress() {
            ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr())
        } else {
            ProgressBar::hidden()
        };
        // The template is a constant and known to be sound.
        let style = ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} cells, {elapsed} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        Self { printer: printer.clone(), bar, blocks: 0, failures: 0 }
    }

    /// Hears one update.
    pub(super) fn hear(&mut self, update: &Update<'_>) {
        match update {
            Update::Notice(text) => self.bar.suspend(|| self.printer.notice(text)),
            Update::Directory(path) => {
                self.bar.suspend(|| self.printer.notice(&format!("writing to {}", path.display())));
            }
            Update::Campaign(News::Block { phase, cells, expected_s }) => {
                self.blocks += 1;
                let word = match phase {
                    Phase::Search => "search",
                    Phase::Gate => "smoke gate",
                    Phase::Final => "final",
                    Phase::Trial => "trial",
                };
                self.bar.set_prefix(format!("{word}, block {}", self.blocks));
                self.bar.set_length(*cells as u64);
                self.bar.set_position(0);
                self.bar.set_message(if *expected_s > 0.0 {
                    format!("(about {} a block)", format_seconds(*expected_s))
                } else {
                    String::new()
                });
            }
            Update::Campaign(News::Stopping) => {
                self.bar.suspend(|| self.printer.notice("finishing the block that runs; press again to stop at once"));
            }
            Update::Campaign(News::Line(line)) => self.hear_line(line),
        }
    }

    fn hear_line(&mut self, line: &JournalLine) {
        if self.printer.shows_events()
            && let Ok(text) = serde_json::to_string(line)
        {
            self.printer.event(&text);
        }
        match &line.event {
            Event::CellMeasured(_) | Event::PassMeasured(_) | Event::GatePassed(_) => self.bar.inc(1),
            Event::CellFailed { arm, outcome, .. } => {
                self.failures += 1;
                // The first few are worth a line; the journal has them all.
                if self.failures <= 5 {
                    let text = format!("arm {arm} {}: {}", outcome.kind.name(), outcome.detail);
                    self.bar.suspend(|| self.printer.notice(&text));
                }
            }
            Event::TrialChosen { arms, reason } => {
                let text = format!("{} arms go into the trial: {reason}", arms.len());
                self.bar.suspend(|| self.printer.notice(&text));
            }
            Event::BlockVoided { block, reason } => {
                self.bar.suspend(|| self.printer.notice(&format!("block {block} counts for nothing: {reason}")));
            }
            Event::FinalistsChosen { arms, reason, .. } => {
                let text = format!("{} finalists: {reason}", arms.len());
                self.bar.suspend(|| self.printer.notice(&text));
            }
            _ => {}
        }
    }

    /// Takes the bar away.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
