//! Which variables are in force, and who set each.

use std::collections::BTreeMap;
use std::path::Path;

use super::machine::RealMachine;
use crate::env_syntax;
use crate::error_kind::{ErrorKind, Failure};
use crate::flow::environment::inherited;
use crate::flow::workload::read_bounded;
use crate::record::{Origin, VariableOrigin};

/// Longest name and value that are taken from a command line.
const NAME_BYTES: usize = 128;
const VALUE_BYTES: usize = 4096;

/// A variable in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) value: String,
    pub(super) origin: VariableOrigin,
}

/// Where variables may come from.
pub(super) struct VariableWish<'a> {
    pub(super) named: &'a [String],
    pub(super) file: Option<&'a Path>,
    pub(super) environment: &'a BTreeMap<String, String>,
    /// What is set around this tool counts for this machine only.
    pub(super) real: Option<&'a RealMachine>,
}

/// Variables in force by name: what was typed wins over the file, the file over what was inherited, and
/// all of these over NCCL's configuration files. Beside them, what to know about those left out.
pub(super) fn variables_in_force(wish: &VariableWish<'_>) -> Result<(Vec<Variable>, Vec<String>), Failure> {
    let mut notes = Vec::new();
    let mut variables = named(wish.named)?;
    let mut add = |name: &str, value: &str, origin: VariableOrigin| {
        if !variables.iter().any(|known| known.name == name) {
            variables.push(Variable { name: name.to_owned(), value: value.to_owned(), origin });
        }
    };
    if let Some(path) = wish.file {
        let text = read_bounded(path, env_syntax::MAX_BYTES as u64).map_err(|error| {
            Failure::new(ErrorKind::Usage, error)
                .with_hint("--env-file takes a file of NAME=VALUE lines, as docker does")
        })?;
        let read = env_syntax::read_env_file(&text).map_err(|error| {
            let hint = crate::error_kind::Classified::hint(&error);
            let failure = Failure::new(ErrorKind::Usage, format!("{}: {error}", path.display()));
            match hint {
                Some(hint) => failure.with_hint(hint),
                None => failure,
            }
        })?;
        let mut others = 0;
        for (_, name, value) in &read {
            if name.starts_with("NCCL_") {
                add(name, value, VariableOrigin::EnvFile);
            } else {
                others += 1;
            }
        }
        if others > 0 {
            let variables = crate::wording::plural(others, "variable", "variables");
            notes.push(format!("{others} {variables} of {} are not NCCL's and do not count", path.display()));
        }
    }
    let around = inherited(wish.environment);
    match wish.real {
        Some(real) => {
            for pin in around.iter().chain(&real.conf) {
                let origin = match pin.origin {
                    Origin::UserConf => VariableOrigin::UserConf,
                    Origin::SystemConf => VariableOrigin::SystemConf,
                    _ => VariableOrigin::Inherited,
                };
                add(&pin.variable, &pin.value, origin);
            }
        }
        None if around.is_empty() => {}
        None => {
            let names: Vec<String> = around.iter().map(|pin| pin.variable.clone()).collect();
            notes.push(format!(
                "{} of this shell do not count for another machine; name them with --env",
                crate::wording::enumerated(&names)
            ));
        }
    }
    variables.sort_by(|one, other| one.name.cmp(&other.name));
    Ok((variables, notes))
}

/// What was typed behind `--env`.
fn named(texts: &[String]) -> Result<Vec<Variable>, Failure> {
    let mut variables: Vec<Variable> = Vec::new();
    for text in texts {
        let shown: String = text.chars().take(80).collect();
        let malformed = |why: &str| {
            Failure::new(ErrorKind::Usage, format!("--env {shown:?}: {why}"))
                .with_hint("write --env NAME=VALUE, such as --env NCCL_PROTO=LL")
        };
        let Some((name, value)) = text.split_once('=') else { return Err(malformed("it is not NAME=VALUE")) };
        if !env_syntax::is_name(name) || name.len() > NAME_BYTES {
            return Err(malformed("what stands before = is no variable name"));
        }
        if value.len() > VALUE_BYTES || value.contains(char::is_control) {
            return Err(malformed("the value is too long, or holds control characters"));
        }
        match variables.iter().find(|known| known.name == name) {
            Some(known) if known.value != value => {
                return Err(malformed(&format!("{name} is also given as {:?}", known.value)));
            }
            Some(_) => {}
            None => {
                let (name, value) = (name.to_owned(), value.to_owned());
                variables.push(Variable { name, value, origin: VariableOrigin::Named });
            }
        }
    }
    Ok(variables)
}

/// The variables as an environment.
pub(super) fn environment_of(variables: &[Variable]) -> BTreeMap<String, String> {
    variables.iter().map(|variable| (variable.name.clone(), variable.value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish<'a>(
        named: &'a [String],
        file: Option<&'a Path>,
        environment: &'a BTreeMap<String, String>,
    ) -> VariableWish<'a> {
        VariableWish { named, file, environment, real: None }
    }

    #[test]
    fn what_was_typed_wins_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("some.env");
        fs_err::write(&file, "NCCL_PROTO=Simple\nNCCL_ALGO=Ring\nPATH=/bin\n").unwrap();
        let named = ["NCCL_PROTO=LL".to_owned(), "NCCL_PROTO=LL".to_owned()];
        let around = BTreeMap::from([("NCCL_NTHREADS".to_owned(), "64".to_owned())]);
        let (variables, notes) = variables_in_force(&wish(&named, Some(&file), &around)).unwrap();
        let told: Vec<_> = variables.iter().map(|v| (v.name.as_str(), v.value.as_str(), v.origin)).collect();
        assert_eq!(told, [("NCCL_ALGO", "Ring", VariableOrigin::EnvFile), ("NCCL_PROTO", "LL", VariableOrigin::Named)]);
        assert!(notes[0].contains("1 variable of") && notes[1].contains("NCCL_NTHREADS of this shell"), "{notes:?}");
    }

    #[test]
    fn bad_text_is_refused_with_its_place() {
        let nothing = BTreeMap::new();
        for bad in ["NCCL_ALGO", "=x", "A B=1", "NCCL_ALGO=a\u{7}"] {
            let named = [bad.to_owned()];
            let error = variables_in_force(&wish(&named, None, &nothing)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{bad}");
            assert!(error.to_string().contains("--env"), "{error}");
        }
        let twice = ["NCCL_ALGO=Ring".to_owned(), "NCCL_ALGO=Tree".to_owned()];
        assert!(variables_in_force(&wish(&twice, None, &nothing)).unwrap_err().to_string().contains("also given as"));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("bad.env");
        fs_err::write(&file, "NCCL_ALGO=Ring\nexport NCCL_PROTO=LL\n").unwrap();
        let error = variables_in_force(&wish(&[], Some(&file), &nothing)).unwrap_err();
        assert!(error.to_string().contains("bad.env: line 2"), "{error}");
        assert!(variables_in_force(&wish(&[], Some(&folder.path().join("none")), &nothing)).is_err());
    }
}
