//! Tuner tables of a simulated run: read by the plugin's own code, heeded as NCCL heeds the plugin.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::file_kind::{FileKind, PLUGIN_VARIABLE};
use crate::machine::NcclVersion;
use crate::nccl_model::{Algorithm, Override, Protocol};
use crate::record::PointKey;
use crate::tuner_table::{Decision, SINCE, Table, collective_index};

/// Tables that were read, by the names that the variable holds.
#[derive(Default)]
pub(super) struct TableCache {
    folder: Option<PathBuf>,
    known: RefCell<HashMap<String, Rc<Result<Table, String>>>>,
}

impl TableCache {
    /// Tables, and the plugin, lie in this folder where a variable names no whole path.
    pub(super) fn of(folder: PathBuf) -> Self {
        Self { folder: Some(folder), known: RefCell::default() }
    }

    /// What the table of an environment says for a message; nothing where there is none or NCCL does not find the
    /// plugin, which it does not mind. A table that cannot be read ends the communicator.
    pub(super) fn decide(
        &self,
        environment: &BTreeMap<String, String>,
        point: PointKey,
        version: NcclVersion,
    ) -> Result<Option<Decision>, String> {
        let (Some(plugin), Some(name)) =
            (environment.get(PLUGIN_VARIABLE), environment.get(FileKind::TunerTable.variable()))
        else {
            return Ok(None);
        };
        let Some(collective) = collective_index(point.collective) else { return Ok(None) };
        if version < SINCE || !self.whole(plugin).is_file() {
            return Ok(None);
        }
        let known = self.known.borrow().get(name).cloned();
        let table = known.unwrap_or_else(|| {
            let table = Rc::new(self.read(name));
            self.known.borrow_mut().insert(name.clone(), Rc::clone(&table));
            table
        });
        let table = table.as_ref().as_ref().map_err(Clone::clone)?;
        Ok(table.of_communicator(u64::from(point.ranks), 1).decide(collective, point.bytes))
    }

    fn whole(&self, path: &str) -> PathBuf {
        self.folder.as_deref().unwrap_or(Path::new("")).join(path)
    }

    fn read(&self, name: &str) -> Result<Table, String> {
        let path = self.whole(name);
        let told = |why: &dyn std::fmt::Display| format!("the tuner plugin cannot use {}: {why}", path.display());
        let bytes = super::read_file(&path, nccl_abi::table::BYTES_MAX).map_err(|error| told(&error))?;
        Table::parse(&bytes).map_err(|error| told(&error))
    }
}

/// The answer that NCCL's rules are given; what they do not know is not chosen, as what NCCL cannot run.
pub(super) fn answer(decided: Option<Decision>) -> Override {
    let Some(decided) = decided else { return Override::default() };
    let name = |names: &[&'static str], index: usize| names.get(index).copied().unwrap_or_default();
    let algorithm = name(&nccl_abi::ALGORITHMS, decided.algorithm);
    let protocol = name(&nccl_abi::PROTOCOLS, decided.protocol);
    let kernel = Algorithm::ALL
        .into_iter()
        .find(|known| known.name() == algorithm)
        .zip(Protocol::ALL.into_iter().find(|known| known.name() == protocol));
    // Without a kernel that it can run, the plugin leaves channels alone as well.
    Override { kernel, channels: kernel.map(|_| decided.channels) }
}
