//! The releases whose rules are known.

use crate::machine::NcclVersion;

use super::ModelError;

/// The first and the last release whose source the rules were taken from.
const OLDEST: NcclVersion = NcclVersion::v2(19, 0);
const NEWEST: NcclVersion = NcclVersion::v2(30, 7);
/// The last release that the newest known one may stand in for.
const NEWEST_STAND_IN: NcclVersion = NcclVersion::v2(32, u32::MAX);

/// A release of NCCL whose rules are known, or one so near to it that its rules may stand in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release {
    wanted: NcclVersion,
    rules: NcclVersion,
}

impl Release {
    /// The rules for a version: its own from 2.19 to 2.30, and those of 2.30.7 for 2.31 and 2.32, whose
    /// source was not read. [`Self::stands_in`] tells the difference.
    pub fn of(version: NcclVersion) -> Result<Self, ModelError> {
        if version < OLDEST || version > NEWEST_STAND_IN {
            return Err(ModelError::UnknownRelease { version, oldest: OLDEST, newest: NEWEST });
        }
        Ok(Self { wanted: version, rules: version.min(NEWEST) })
    }

    /// The version that was asked for.
    pub const fn version(self) -> NcclVersion {
        self.wanted
    }

    /// The release whose rules are used.
    pub const fn rules(self) -> NcclVersion {
        self.rules
    }

    /// Whether the rules are another release's, which is the nearest known.
    pub fn stands_in(self) -> bool {
        self.wanted != self.rules
    }
}
