//! Tuner tables of a run: made where the search ends, measured from there on like any other arm.

use std::path::Path;

use super::directory::{self, MANIFEST_FILE};
use super::files::{RunFiles, from_anywhere};
use super::plugin::Plugin;
use super::tune::TuneRequest;
use crate::error_kind::{ErrorKind, Failure};
use crate::evidence::Evidence;
use crate::file_kind::{FileKind, PLUGIN_FILE, PLUGIN_VARIABLE};
use crate::machine::NcclVersion;
use crate::record::{Arm, BackendKind, Manifest, Pin, TableRecord};
use crate::search::SearchContext;
use crate::search::tables::{ProposedTable, propose};
use crate::space;
use crate::tuner_table::{self, LOGGED_SINCE, SINCE, foreign_to};
use crate::units::group_thousands;

/// Whether tables are made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TableWish {
    /// Where the plugin is there and NCCL loads it.
    #[default]
    Auto,
    /// Not at all.
    Never,
}

/// What a run has for tables.
#[derive(Debug, Clone, Default)]
pub(super) struct Tables {
    /// The plugin; none where no table is to be made or measured.
    plugin: Option<Plugin>,
    /// Whether tables are made of what the search sees.
    pub(super) are_made: bool,
}

/// What decides whether a run has tables.
pub(super) struct Setting<'a> {
    pub(super) kind: BackendKind,
    pub(super) previous: Option<&'a Manifest>,
    pub(super) version: NcclVersion,
    pub(super) pins: &'a [Pin],
    pub(super) arms: &'a [Arm],
    pub(super) files: &'a RunFiles,
    pub(super) ranks: u32,
}

impl Tables {
    /// What a run has for tables, and what its manifest says of it.
    pub(super) fn with_record(
        request: &TuneRequest,
        setting: &Setting<'_>,
        notices: &mut Vec<String>,
    ) -> Result<(Self, Option<TableRecord>), Failure> {
        let tables = Self::of(request, setting, notices)?;
        let record = tables.record(setting.previous, setting.arms);
        Ok((tables, record))
    }

    /// Finds the plugin, where it is of use.
    fn of(request: &TuneRequest, setting: &Setting<'_>, notices: &mut Vec<String>) -> Result<Self, Failure> {
        let Setting { kind, previous, version, pins, arms, files, ranks } = *setting;
        let mut tell = |notice: String| {
            if !notices.contains(&notice) {
                notices.push(notice);
            }
        };
        let record = previous.and_then(|manifest| manifest.tables.as_ref());
        if kind == BackendKind::Replay {
            // Recorded figures need no plugin; an answer that is deployed does, and is refused without.
            let known = request.recorded.as_deref().zip(record);
            let plugin = known.and_then(|(run, record)| Plugin::of_run(run, &record.plugin).ok());
            return Ok(Self { plugin, are_made: false });
        }
        if let (true, Some(run), Some(record)) = (request.resume, &request.out, record) {
            let plugin = Some(Plugin::of_run(run, &record.plugin)?);
            return Ok(Self { plugin, are_made: previous.is_some_and(|manifest| manifest.makes_tables) });
        }
        if request.resume && previous.is_some_and(|manifest| !manifest.makes_tables) {
            // It began without, and goes on as it began.
            return Ok(Self::default());
        }
        let given = arms.iter().find(|arm| arm.files.contains_key(&FileKind::TunerTable));
        if let (Some(arm), true) = (given, version < SINCE) {
            return Err(Failure::new(
                ErrorKind::Usage,
                format!("arm {:?} has a tuner table, and NCCL {version} loads no plugin of this tool", arm.name),
            )
            .with_hint(format!("tables need NCCL {SINCE} or newer")));
        }
        for arm in arms.iter().filter(|_| previous.is_none()) {
            if let Some(why) = files.table_of(arm).and_then(|table| foreign_to(&table, ranks)) {
                return Err(Failure::new(ErrorKind::Usage, format!("the tuner table of arm {:?}: {why}", arm.name))
                    .with_hint(
                        "the columns are collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks",
                    ));
            }
        }
        let pinned =
            pins.iter().find(|pin| pin.variable == PLUGIN_VARIABLE || pin.variable == FileKind::TunerTable.variable());
        let reason = if given.is_some() {
            None
        } else if request.tables == TableWish::Never || arms.len() == 1 {
            return Ok(Self::default());
        } else if let Some(pin) = pinned {
            Some(format!("{} is fixed: no tuner table is tried", pin.variable))
        } else if version < SINCE {
            Some(format!("no tuner table is tried: NCCL {version} loads no plugin of this tool; {SINCE} and newer do"))
        } else if version < LOGGED_SINCE {
            Some(format!("no tuner table is tried: NCCL {version} does not log channels; {LOGGED_SINCE} and newer do"))
        } else {
            None
        };
        if let Some(reason) = reason {
            tell(reason);
            return Ok(Self::default());
        }
        let called = previous.filter(|_| request.resume).and_then(|manifest| manifest.call_plugin.as_ref());
        let plugin = match request.out.as_deref().zip(called) {
            // A run has one copy of the plugin, and arms that were measured with it.
            Some((run, record)) => Some(Plugin::of_run(run, record)?),
            None => Plugin::find(request.plugin.as_deref())?,
        };
        match (&plugin, given) {
            (None, Some(arm)) => Err(Failure::new(
                ErrorKind::Usage,
                format!("arm {:?} has a tuner table, and {PLUGIN_FILE} is not beside this program", arm.name),
            )
            .with_hint("name it with --plugin PATH, or build it: cargo build")),
            (None, None) => {
                tell(format!(
                    "no tuner table is tried: {PLUGIN_FILE} of this version is neither beside this program nor in deps/ \
                     or ../lib/nccltune from there; --plugin PATH names it"
                ));
                Ok(Self::default())
            }
            (Some(_), _) => Ok(Self { plugin, are_made: request.tables == TableWish::Auto }),
        }
    }

    /// For the manifest of a run whose arms brought tables of their own.
    fn record(&self, previous: Option<&Manifest>, arms: &[Arm]) -> Option<TableRecord> {
        if let Some(record) = previous.and_then(|manifest| manifest.tables.clone()) {
            return Some(record);
        }
        let given = arms.iter().any(|arm| arm.files.contains_key(&FileKind::TunerTable));
        let plugin = self.plugin.as_ref().filter(|_| given)?;
        Some(TableRecord { plugin: plugin.record.clone(), arms: Vec::new() })
    }

    /// Puts the plugin into the directory of a run that begins with tables.
    pub(super) fn write_plugin(&self, manifest: &Manifest, directory: &Path) -> Result<(), Failure> {
        match &self.plugin {
            Some(plugin) if manifest.tables.is_some() => plugin.write(directory),
            _ => Ok(()),
        }
    }

    /// Makes tables of what the search saw, and writes them into the run. The manifest knows them before anything is
    /// measured with them.
    pub(super) fn make(
        &self,
        context: &SearchContext,
        evidence: &Evidence,
        manifest: &mut Manifest,
        directory: &Path,
    ) -> Result<Vec<String>, Failure> {
        let Some(plugin) = self.plugin.as_ref().filter(|_| self.are_made) else { return Ok(Vec::new()) };
        let mut files = RunFiles::default();
        let mut arms = Vec::new();
        let mut told = Vec::new();
        for table in propose(context, evidence) {
            let Some(base) = context.arms.iter().find(|arm| arm.id == table.base) else { continue };
            let arm = table_arm(manifest, base, &table, &mut files);
            told.push(format!(
                "a tuner table is tried: {}, {} {}, expected at {:.3} of the default",
                arm.name,
                table.rows.len(),
                crate::wording::plural(table.rows.len() as u32, "row", "rows"),
                table.expected_log.exp()
            ));
            arms.push(arm);
        }
        if arms.is_empty() {
            return Ok(told);
        }
        if let Err(failure) = from_anywhere(directory, &files) {
            return Ok(vec![format!("no tuner table is tried: {failure}")]);
        }
        plugin.write(directory)?;
        files.write(directory)?;
        manifest.tables = Some(TableRecord { plugin: plugin.record.clone(), arms });
        let text =
            serde_json::to_string_pretty(manifest).map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
        directory::write(directory, MANIFEST_FILE, &(text + "\n"))?;
        Ok(told)
    }
}

/// The arm of a table: what its base sets, and the table.
fn table_arm(manifest: &Manifest, base: &Arm, table: &ProposedTable, files: &mut RunFiles) -> Arm {
    let text = tuner_table::write(&header(manifest, base, table), &table.rows);
    let sha256 = files.add(FileKind::TunerTable, text);
    let mut beside = base.files.clone();
    beside.insert(FileKind::TunerTable, sha256);
    let name = if base.env.is_empty() && base.files.is_empty() {
        "tuner table".to_owned()
    } else {
        format!("tuner table + {}", base.name)
    };
    space::arm(&name, base.env.clone(), beside)
}

/// What a table says of itself. Nothing in it may differ from one making to the next: it is known by its hash.
fn header(manifest: &Manifest, base: &Arm, table: &ProposedTable) -> Vec<String> {
    let workload = &manifest.workload;
    let mut lines = vec![format!(
        "nccltune: tuner table for {}, TP {}, on {}",
        workload.model, workload.tensor_parallel, manifest.machine.name
    )];
    lines.extend(manifest.labels.words().into_iter().map(str::to_owned));
    let ranks: std::collections::BTreeSet<u64> = table.rows.iter().filter_map(|row| row.ranks).collect();
    let ranks: Vec<String> = ranks.into_iter().map(group_thousands).collect();
    lines.push(format!(
        "For {PLUGIN_FILE} of nccltune and no other plugin, and for communicators of {} ranks on one machine; all others \
         keep NCCL's own choices.",
        ranks.join(" or ")
    ));
    lines.push(
        "Known by its SHA-256, which stands in its name: never edit it. A size without a row is left to NCCL, because \
         nothing better was shown there."
            .to_owned(),
    );
    lines.push(if base.env.is_empty() {
        "Measured without other variables beside it.".to_owned()
    } else {
        let variables: Vec<String> = base.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        format!("Measured beside {}, and only so.", variables.join(" "))
    });
    lines
}

/// A manifest whose arms are all that were measured, tables among them.
pub(super) fn whole(mut manifest: Manifest) -> Manifest {
    if let Some(tables) = &manifest.tables {
        let known: Vec<Arm> = manifest.arms.clone();
        manifest.arms.extend(tables.arms.iter().filter(|arm| !known.iter().any(|other| other.id == arm.id)).cloned());
    }
    manifest
}
