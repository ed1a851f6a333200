//! Whether a search can be had at call level, and with which plugin.

use super::plugin::Plugin;
use super::tables::Setting;
use super::tune::TuneRequest;
use crate::error_kind::{ErrorKind, Failure};
use crate::file_kind::PLUGIN_FILE;
use crate::knob::{CALL_RIVALS, CALL_VARIABLES};
use crate::record::{BackendKind, CheapestLevel, PluginRecord, Settings};
use crate::tuner_table::LOGGED_SINCE;

/// The plugin that workers of the search are to load, and what the manifest says of it. Neither where no arm is
/// measured at call level; only the record where no worker is started.
pub(super) fn call_plugin(
    request: &TuneRequest,
    setting: &Setting<'_>,
    settings: &Settings,
) -> Result<(Option<Plugin>, Option<PluginRecord>), Failure> {
    let Setting { kind, previous, version, pins, .. } = *setting;
    if settings.cheapest_level != CheapestLevel::Call {
        return Ok((None, None));
    }
    let refused = |why: String, hint: &str| {
        Err(Failure::new(ErrorKind::Usage, format!("--cheapest-level call: {why}")).with_hint(hint.to_owned()))
    };
    let known = previous.and_then(|manifest| manifest.call_plugin.clone());
    if kind == BackendKind::Replay {
        return Ok((None, known));
    }
    if version < LOGGED_SINCE {
        return refused(
            format!("NCCL {version} does not log how many channels a message ran with"),
            "2.24 and newer do; with an older one, search at communicator level",
        );
    }
    // What holds in every arm is in the communicator's environment, where it would decide beside the plugin.
    let decides = |name: &str| CALL_VARIABLES.contains(&name) || CALL_RIVALS.contains(&name);
    if let Some(pin) = pins.iter().find(|pin| decides(&pin.variable)) {
        return refused(
            format!("{} is fixed, which the tuner plugin would have to choose", pin.variable),
            "leave it out, or search at communicator level",
        );
    }
    if kind == BackendKind::Simulated {
        // The plugin is asked nothing there: the arm's own variables mean the same.
        return Ok((None, None));
    }
    if let (true, Some(run), Some(record)) = (request.resume, &request.out, &known) {
        return Ok((Some(Plugin::of_run(run, record)?), known));
    }
    match Plugin::find(request.plugin.as_deref())? {
        Some(plugin) => {
            let record = plugin.record.clone();
            Ok((Some(plugin), Some(record)))
        }
        None => refused(
            format!("{PLUGIN_FILE} of this version is neither beside this program nor in deps/ or ../lib/nccltune"),
            "name it with --plugin PATH, or build it: cargo build",
        ),
    }
}
