//! The formats in which data is printed.

use crate::error_kind::{Classified, ErrorKind};
use crate::units::nearest_name;

/// What `--format` takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// For a person at a terminal.
    #[default]
    Text,
    /// The record as it is on disk.
    Json,
    /// For a spreadsheet.
    Csv,
    /// For a pull request or a wiki.
    Markdown,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 4] = [Self::Text, Self::Json, Self::Csv, Self::Markdown];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
            Self::Csv => "csv",
            Self::Markdown => "markdown",
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// A format nobody writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no format; there are text, json, csv and markdown")]
pub struct FormatError {
    /// What was given.
    text: String,
}

impl Classified for FormatError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }

    fn hint(&self) -> Option<String> {
        nearest_name(&self.text, Format::ALL.map(Format::name)).map(|name| format!("did you mean {name}?"))
    }
}

impl std::str::FromStr for Format {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == text)
            .ok_or_else(|| FormatError { text: text.chars().take(60).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_and_a_typo_gets_a_hint() {
        for format in Format::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        let error = "jsn".parse::<Format>().unwrap_err();
        assert_eq!(error.to_string(), "\"jsn\" is no format; there are text, json, csv and markdown");
        assert_eq!(error.hint().as_deref(), Some("did you mean json?"));
    }
}
