//! What an error means for the person at the terminal, and the exit status that says so.
//!
//! Every error type of the tool maps itself to one [`ErrorKind`]; the exit status comes from the
//! one match in [`ErrorKind::exit_status`], so the two can never disagree.

/// The kinds of failure a user can tell apart, each with its own exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// A defect in the tool or something nobody foresaw.
    Unexpected,
    /// Wrong usage, unreadable or contradictory input, or a full disk before the first event.
    Usage,
    /// The machine is not fit: doctor failed, the driver is there but unusable, a GPU is taken.
    MachineUnfit,
    /// Every launch failed: there is nothing to judge.
    NothingMeasured,
    /// The run ended undecided and the user asked for a decision (`--require-decision`).
    Undecided,
    /// Stopped without a verdict; the run can be resumed (Ctrl-C, budget, full disk).
    Stopped,
    /// The file no longer holds on this machine.
    Stale,
}

impl ErrorKind {
    /// The exit status for this kind, as documented in docs/reference/exit-statuses.md.
    pub const fn exit_status(self) -> u8 {
        match self {
            Self::Unexpected => 1,
            Self::Usage => 2,
            Self::MachineUnfit => 3,
            Self::NothingMeasured => 4,
            Self::Undecided => 5,
            Self::Stopped => 6,
            Self::Stale => 7,
        }
    }
}

/// An error that knows its [`ErrorKind`], and what the user can do about it.
pub trait Classified: std::error::Error + Send + Sync + 'static {
    /// The kind, which decides the exit status.
    fn kind(&self) -> ErrorKind;

    /// A sentence on what to do next, where there is one.
    fn hint(&self) -> Option<String> {
        None
    }
}

/// Any classified error on its way up to `main`.
#[derive(Debug)]
pub struct Failure {
    kind: ErrorKind,
    hint: Option<String>,
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl Failure {
    /// Wraps an error that has no type of its own.
    pub fn new(kind: ErrorKind, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { kind, hint: None, source: source.into() }
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The kind, which decides the exit status.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", self.source)?;
        let mut cause = self.source.source();
        while let Some(error) = cause {
            write!(formatter, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

// `Failure` does not implement `std::error::Error` itself: that keeps the blanket conversion below
// free of overlap, and nothing above `main` wants to box it again.
impl<E: Classified> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { kind: error.kind(), hint: error.hint(), source: Box::new(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_statuses_are_distinct_and_documented() {
        let kinds = [
            ErrorKind::Unexpected,
            ErrorKind::Usage,
            ErrorKind::MachineUnfit,
            ErrorKind::NothingMeasured,
            ErrorKind::Undecided,
            ErrorKind::Stopped,
            ErrorKind::Stale,
        ];
        let statuses: Vec<u8> = kinds.iter().map(|kind| kind.exit_status()).collect();
        assert_eq!(statuses, [1, 2, 3, 4, 5, 6, 7]);
    }
}
