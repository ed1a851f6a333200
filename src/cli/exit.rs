//! One function per command, and the exit status of each.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory as _;

use super::args::{
    BackendArg, CheckArgs, Cli, Command, CompletionsArgs, DoctorArgs, EmitArgs, ExecArgs, ExplainArgs, ImportArgs,
    LintArgs, ManArgs, PlacementArg, ReportArgs, TrialArgs, TrialKind, TuneArgs, WorkloadArgs, WorkloadCommandArgs,
};
use super::args::{BuffersArg, CheapestLevelArg, ProfileArg, StrategyArg};
use super::environment;
use super::printer::Printer;
use super::progress::Progress;
use crate::error_kind::{ErrorKind, Failure};
use crate::flow::BackendChoice;
use crate::flow::check::{CheckRequest, check};
use crate::flow::doctor::{DoctorRequest, doctor};
use crate::flow::emit::emit;
use crate::flow::exec::{ExecRequest, VerifyRequest, exec, verify};
use crate::flow::explain::{ExplainRequest, explain};
use crate::flow::import::{ImportRequest, Imported, import, next_step, rows};
use crate::flow::lint::{LintRequest, lint};
use crate::flow::report::report;
use crate::flow::tune::{Plan, TuneEnd, TuneRequest, tune};
use crate::flow::workload::{WorkloadWish, workload};
use crate::flow::write_file;
use crate::process::replace;
use crate::record::{DeploymentVerdict, LintSeverity, UpdateVerdict, VerdictKind};
use crate::report::{
    Format, Run, checks_table, deployment_table, explanation, files_text, findings_table, import_document,
    points_table, summary_csv, to_json, update_table, verdict,
};
use crate::search::RACING;
use crate::units::{format_seconds, group_thousands};
use crate::workload::Layout;

/// Runs a command.
pub(super) fn run(cli: &Cli, arguments: Vec<String>) -> ExitCode {
    let printer = Printer::new(&cli.output);
    let result = match &cli.command {
        Command::Tune(args) => run_tune(args, &printer, arguments),
        Command::Trial(args) => run_trial(args, &printer, arguments),
        Command::Doctor(args) => run_doctor(args, &printer),
        Command::Workload(args) => run_workload(args),
        Command::Explain(args) => run_explain(args),
        Command::Emit(args) => run_emit(args),
        Command::Report(args) => run_report(args, &printer),
        Command::Import(args) => run_import(args, arguments),
        Command::Completions(args) => run_completions(args),
        Command::Man(args) => run_man(args, &printer),
        Command::Lint(args) => run_lint(args),
        Command::Check(args) => run_check(args, &printer),
        Command::Exec(args) => run_exec(args, &printer),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            Printer::error(&failure.to_string(), failure.hint());
            ExitCode::from(failure.kind().exit_status())
        }
    }
}

/// What clap has to say: help and version are data, anything else is wrong usage.
pub(super) fn usage(error: &clap::Error) -> ExitCode {
    // Nobody is left to tell when the stream is gone.
    let _ = error.print();
    if error.use_stderr() { ExitCode::from(ErrorKind::Usage.exit_status()) } else { ExitCode::SUCCESS }
}

fn print(text: &str) -> Result<(), Failure> {
    Printer::data(text)
        .map_err(|error| Failure::new(ErrorKind::Unexpected, format!("could not write the answer: {error}")))
}

fn run_tune(args: &TuneArgs, printer: &Printer, arguments: Vec<String>) -> Result<u8, Failure> {
    let environment = environment::snapshot();
    let request = TuneRequest {
        backend: backend_choice(args.backend),
        machine: args.machine.clone(),
        recorded: args.recorded.clone(),
        workload: wish(&args.workload),
        space: args.space.clone(),
        strategy: args.strategy.map(StrategyArg::name),
        warm_start: args.warm_start.clone(),
        time_budget_s: args.time_budget,
        min_gain: args.min_gain,
        max_regression: args.max_regression,
        strict: args.strict,
        profile: args.profile.map(ProfileArg::profile),
        buffers: args.buffers.map(BuffersArg::kind),
        cheapest_level: args.cheapest_level.map(CheapestLevelArg::level),
        cell_time_ms: args.cell_time,
        max_extra_memory_mib: args.max_extra_memory.map(|bytes| bytes as f64 / f64::from(1 << 20)),
        phase_limit: args.phase_limit.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        pins: args.pins.clone(),
        keep_environment: args.keep_env.clone(),
        allow_risk: args.allow_risk.clone(),
        repair_graph: args.repair_graph.wish(),
        keep_dead_axes: args.keep_dead_axes,
        tables: args.tables.wish(),
        plugin: args.plugin.clone(),
        nccl_lib: args.nccl_lib.clone(),
        devices: args.devices.clone(),
        seed: args.seed,
        out: args.out.clone(),
        resume: args.resume,
        assume_noise: args.assume_noise,
        search_blocks: args.search_blocks,
        final_launches: args.final_launches,
        no_trial: args.no_trial,
        require_trial: false,
        context: args.trial.context,
        trial_launches: args.trial.trial_launches,
        cublaslt_lib: args.trial.cublaslt_lib.clone(),
        dry_run: args.dry_run,
        peer_access: args.peer_access.wish(),
        overlap_s: args.overlap_time,
        force: args.force,
        retry_quarantined: args.retry_quarantined,
        state_folder: environment::state_folder(&environment),
        arguments,
        environment,
    };
    tune_and_print(&request, printer, args.format.format, args.require_decision)
}

fn run_trial(args: &TrialArgs, printer: &Printer, arguments: Vec<String>) -> Result<u8, Failure> {
    let TrialKind::Verify = args.kind;
    let environment = environment::snapshot();
    let request = TuneRequest {
        backend: backend_choice(args.backend),
        workload: wish(&args.workload),
        // Without a run there are no finalists: the default alone, a few launches.
        space: args.run.is_none().then(|| "baseline".to_owned()),
        search_blocks: args.run.is_none().then_some(1),
        pins: args.pins.clone(),
        nccl_lib: args.nccl_lib.clone(),
        devices: args.devices.clone(),
        out: args.run.clone().or_else(|| args.out.clone()),
        resume: args.run.is_some(),
        require_trial: true,
        context: args.trial.context,
        trial_launches: args.trial.trial_launches,
        cublaslt_lib: args.trial.cublaslt_lib.clone(),
        state_folder: environment::state_folder(&environment),
        arguments,
        environment,
        ..TuneRequest::default()
    };
    tune_and_print(&request, printer, args.format.format, false)
}

fn backend_choice(backend: BackendArg) -> BackendChoice {
    match backend {
        BackendArg::Auto => BackendChoice::Auto,
        BackendArg::Nccl => BackendChoice::Nccl,
        BackendArg::Simulated => BackendChoice::Simulated,
        BackendArg::Replay => BackendChoice::Replay,
    }
}

fn tune_and_print(
    request: &TuneRequest,
    printer: &Printer,
    format: Format,
    require_decision: bool,
) -> Result<u8, Failure> {
    let mut progress = Progress::new(printer);
    let end = tune(request, &mut |update| progress.hear(&update));
    progress.finish();
    match end? {
        TuneEnd::Planned(plan) => {
            print(&plan_text(&plan, format)?)?;
            Ok(0)
        }
        TuneEnd::Answered { choice, manifest, directory } => {
            let width = Printer::width();
            let mut text = verdict(&choice, &manifest, format, width)?;
            if format == Format::Text {
                text.push('\n');
                text.push_str(&files_text(&choice, &directory.display().to_string(), width));
            }
            print(&text)?;
            if choice.verdict == VerdictKind::Undecided && require_decision {
                return Ok(ErrorKind::Undecided.exit_status());
            }
            Ok(0)
        }
    }
}

fn wish(args: &WorkloadArgs) -> WorkloadWish {
    WorkloadWish {
        model: args.model.clone(),
        engine: args.engine,
        tensor_parallel: args.tp,
        batches: args.batch.clone(),
        verify_tokens: args.verify_tokens,
        chunk: args.chunk,
        assume_decoder: args.assume_decoder,
        engine_version: args.engine_version,
        draft_model: args.draft_model.clone(),
        draft_steps: args.draft_steps,
        draft_topk: args.draft_topk,
        layout: Layout {
            attention_data_parallel: args.dp_attention,
            expert_parallel: args.ep,
            pipeline_stages: args.pp.unwrap_or(1),
        },
        from_log: args.from_log.clone(),
        sizes: (!args.sizes.is_empty()).then(|| args.sizes.clone()),
        collective: args.collective,
        dtype: args.dtype,
        placement: args.placement.map(PlacementArg::placement),
        eager: args.eager,
    }
}

fn plan_text(plan: &Plan, format: Format) -> Result<String, Failure> {
    let manifest = &plan.manifest;
    if format == Format::Json {
        return Ok(to_json(&serde_json::json!({
            "labels": manifest.labels.words(),
            "machine": manifest.machine.name,
            "arms": manifest.arms,
            "notices": manifest.notices,
            "workload": manifest.workload,
            "settings": manifest.settings,
            "launches_per_search_block": plan.launches_per_block,
            "search_cells": plan.search_cells,
            "final_cells": plan.final_cells,
        }))?);
    }
    let mut text = String::new();
    let mut line = |what: &str, value: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{what:<10} {value}");
    };
    let labels = manifest.labels.words().join(", ");
    if !labels.is_empty() {
        line("labels", &labels);
    }
    line("machine", &manifest.machine.name);
    line(
        "model",
        &format!(
            "{}, TP {}, engine {}",
            manifest.workload.model, manifest.workload.tensor_parallel, manifest.workload.engine
        ),
    );
    line("space", &format!("{}: {} arms with the default", manifest.space.name, manifest.arms.len()));
    let races = manifest.settings.strategy == RACING;
    if races {
        line(
            "search",
            &format!(
                "racing, {} launches in the first block, about {} cells at most",
                plan.launches_per_block, plan.search_cells
            ),
        );
    } else {
        line(
            "search",
            &format!(
                "{} blocks of {} launches, {} cells",
                manifest.settings.search_blocks, plan.launches_per_block, plan.search_cells
            ),
        );
    }
    for (phase, points) in [("point", &manifest.workload.points), ("guard", &manifest.workload.guard)] {
        for point in points.iter().filter(|point| point.measured) {
            let bytes = group_thousands(point.bytes);
            line(
                phase,
                &format!("{} of {bytes} bytes, {}, batch {}", point.collective, point.phase.name(), point.batch),
            );
        }
    }
    if let Some(trial) = &plan.trial {
        let passes = trial.cases.len();
        line("trial", &format!("up to {} finalists in {passes} forward passes", trial.finalists));
    }
    line(
        "final",
        &format!(
            "up to {} finalists beside the default, about {} cells",
            manifest.settings.finalists, plan.final_cells
        ),
    );
    let finals = f64::from(manifest.settings.finalists + 1) * 12.0;
    let trial = plan.trial.as_ref().map_or(0.0, |trial| {
        f64::from(trial.launches * (trial.finalists + 1)) * (2.0 + 1.5 * trial.cases.len() as f64)
    });
    let seconds = plan.block_s * plan.search_blocks + plan.final_launch_s * finals + trial;
    line("time", &format!("about {} on real GPUs", format_seconds(seconds)));
    for arm in &manifest.arms {
        line("arm", &arm.name);
    }
    Ok(text)
}

fn run_doctor(args: &DoctorArgs, printer: &Printer) -> Result<u8, Failure> {
    let environment = environment::snapshot();
    let request = DoctorRequest {
        devices: args.devices.clone(),
        nccl_lib: args.nccl_lib.clone(),
        root: args.root.clone(),
        live: args.live,
        sample: args.sample,
        bundle: args.bundle.clone(),
        peer_access: args.peer_access.wish(),
        phase_limit: args.phase_limit.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        state_folder: environment::state_folder(&environment),
        environment,
    };
    let mut progress = Progress::new(printer);
    let answer = doctor(&request, &mut |update| progress.hear(&update));
    progress.finish();
    let (report, refusal) = answer?;
    // Evidence may be long; folded it can be read in a pipe and a log, too.
    print(&checks_table(&report, args.format.format, Printer::width().or(Some(120)))?)?;
    Ok(if refusal.is_some() { ErrorKind::MachineUnfit.exit_status() } else { 0 })
}

fn run_workload(args: &WorkloadCommandArgs) -> Result<u8, Failure> {
    let ranks = args.workload.tp.unwrap_or(8);
    let memory_mib = args.gpu_memory.map(|bytes| bytes >> 20);
    let workload = workload(&wish(&args.workload), ranks, memory_mib)?;
    print(&points_table(&workload, args.format.format, Printer::width())?)?;
    Ok(0)
}

fn run_explain(args: &ExplainArgs) -> Result<u8, Failure> {
    let request = ExplainRequest {
        machine: args.machine.clone(),
        variables: args.variables.clone(),
        env_file: args.env_file.clone(),
        sizes: args.sizes.clone(),
        collective: args.collective,
        nccl: args.nccl,
        nccl_lib: args.nccl_lib.clone(),
        devices: args.devices.clone(),
        root: args.root.clone(),
        no_launch: args.no_launch,
        environment: environment::snapshot(),
    };
    let answer = explain(&request)?;
    // Sentences are long; folded they can be read in a pipe and a log, too.
    print(&explanation(&answer, args.format.format, Printer::width().or(Some(80)))?)?;
    Ok(0)
}

fn run_lint(args: &LintArgs) -> Result<u8, Failure> {
    let request =
        LintRequest { files: args.files.clone(), consumer: args.kind.clone(), nccl: args.nccl, engine: args.engine };
    let report = lint(&request)?;
    print(&findings_table(&report, args.format.format)?)?;
    let counts = |severity| args.strict || severity == LintSeverity::Error;
    let is_bad = report.findings.iter().any(|finding| counts(finding.severity));
    Ok(if is_bad { ErrorKind::Usage.exit_status() } else { 0 })
}

fn run_check(args: &CheckArgs, printer: &Printer) -> Result<u8, Failure> {
    let environment = environment::snapshot();
    let request = CheckRequest {
        env_file: args.env_file.clone(),
        run: args.run.clone(),
        backend: backend_choice(args.backend),
        machine: args.machine.clone(),
        nccl_lib: args.nccl_lib.clone(),
        devices: args.devices.clone(),
        force: args.force,
        time_budget_s: args.time_budget,
        seed: args.seed,
        state_folder: environment::state_folder(&environment),
        environment,
    };
    let mut progress = Progress::new(printer);
    let answer = check(&request, &mut |update| progress.hear(&update));
    progress.finish();
    let found = answer?;
    // Reasons are long; folded they can be read in a pipe and a log, too.
    print(&update_table(&found, args.format.format, Printer::width().or(Some(120)))?)?;
    Ok(match found.verdict {
        verdict if verdict.is_stale() => ErrorKind::Stale.exit_status(),
        UpdateVerdict::Undecided if args.require_decision => ErrorKind::Undecided.exit_status(),
        _ => 0,
    })
}

/// What shells say where a command is not found, and where it cannot be started.
const NOT_FOUND: u8 = 127;
const NOT_STARTED: u8 = 126;

fn run_exec(args: &ExecArgs, printer: &Printer) -> Result<u8, Failure> {
    if args.verify {
        let request = VerifyRequest {
            env_file: args.env_file.clone(),
            process_id: args.pid,
            root: args.root.clone().unwrap_or_else(|| "/".into()),
        };
        let seen = verify(&request)?;
        print(&deployment_table(&seen, args.format.format, Printer::width().or(Some(120)))?)?;
        let is_shown = seen.verdict == DeploymentVerdict::Shown;
        return Ok(if is_shown { 0 } else { ErrorKind::MachineUnfit.exit_status() });
    }
    let request = ExecRequest {
        env_file: args.env_file.clone(),
        run: args.run.clone(),
        nccl_lib: args.nccl_lib.clone(),
        force: args.force,
        root: args.root.clone().unwrap_or_else(|| "/".into()),
        environment: environment::snapshot(),
    };
    let start = exec(&request)?;
    for notice in &start.notices {
        printer.notice(notice);
    }
    if let Some(overridden) = &start.overridden {
        // Told even to those who want to hear nothing: it is the only record there is.
        Printer::warning(overridden);
    }
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Failure::new(ErrorKind::Usage, "name a command behind --"));
    };
    let error = replace(program, arguments, &start.set, &start.removed);
    Printer::error(&format!("{program} could not be started: {error}"), None);
    Ok(if error.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { NOT_STARTED })
}

fn run_emit(args: &EmitArgs) -> Result<u8, Failure> {
    print(&emit(&args.run, args.emit_as)?)?;
    Ok(0)
}

fn run_report(args: &ReportArgs, printer: &Printer) -> Result<u8, Failure> {
    let Some(run) = args.directory.as_ref().or(args.run.as_ref()) else {
        return Err(Failure::new(ErrorKind::Usage, "name a run directory"));
    };
    let width = if args.out.is_some() { None } else { Printer::width() };
    let text = report(run, args.format, width)?;
    match &args.out {
        Some(path) => {
            write_file(path, &text)?;
            printer.notice(&format!("written to {}", path.display()));
        }
        None => print(&text)?,
    }
    Ok(0)
}

fn run_import(args: &ImportArgs, arguments: Vec<String>) -> Result<u8, Failure> {
    let request = ImportRequest {
        out: args.out.clone(),
        files: args.files.clone(),
        env: args.env.clone(),
        pins: args.pins.clone(),
        ranks: args.ranks,
        collective: args.collective,
        placement: args.placement.map(PlacementArg::placement),
        machine_name: args.machine_name.clone(),
        arguments,
    };
    let imported = import(&request)?;
    print(&import_text(&imported, args)?)?;
    Ok(0)
}

fn import_text(imported: &Imported, args: &ImportArgs) -> Result<String, Failure> {
    let Imported { manifest, evidence, arm, remarks } = imported;
    let next = next_step(imported, &args.out);
    let count = args.files.len() as u32;
    let added = format!(
        "{count} {} of {} imported into {}",
        crate::wording::plural(count, "launch", "launches"),
        arm.name,
        args.out.display()
    );
    let run = Run { manifest, choice: None, evidence, lines: &[] };
    let width = Printer::width();
    Ok(match args.format.format {
        Format::Text => import_document(&run, &added, &next, remarks, width, false),
        Format::Markdown => import_document(&run, &added, &next, remarks, None, true),
        Format::Csv => summary_csv(&rows(imported)),
        Format::Json => to_json(&serde_json::json!({
            "labels": manifest.labels.words(),
            "run": args.out.display().to_string(),
            "arm": arm,
            "arms": manifest.arms,
            "files": manifest.imported_files,
            "points": manifest.workload.points,
            "remarks": remarks,
            "next": next,
        }))?,
    })
}

fn run_completions(args: &CompletionsArgs) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "nccltune", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

fn run_man(args: &ManArgs, printer: &Printer) -> Result<u8, Failure> {
    let mut program = Cli::command();
    program.build();
    let unwritable = |error: std::io::Error| Failure::new(ErrorKind::Unexpected, error);
    let page = |command: &clap::Command| -> Result<String, Failure> {
        let mut page = Vec::new();
        let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
        clap_mangen::Man::new(command.clone()).title(name).render(&mut page).map_err(unwritable)?;
        Ok(String::from_utf8_lossy(&page).into_owned())
    };
    let commands: Vec<&clap::Command> =
        program.get_subcommands().filter(|command| command.get_name() != "help").collect();
    if let Some(folder) = &args.out {
        fs_err::create_dir_all(folder).map_err(|error| Failure::new(ErrorKind::Usage, error))?;
        write_file(&folder.join("nccltune.1"), &page(&program)?)?;
        for command in &commands {
            write_file(&folder.join(format!("nccltune-{}.1", command.get_name())), &page(command)?)?;
        }
        printer.notice(&format!("{} pages written to {}", commands.len() + 1, folder.display()));
        return Ok(0);
    }
    let text = match &args.command {
        None => page(&program)?,
        Some(name) => {
            let Some(command) = commands.iter().find(|command| command.get_name() == name) else {
                let names: Vec<&str> = commands.iter().map(|command| command.get_name()).collect();
                return Err(Failure::new(ErrorKind::Usage, format!("there is no command {name:?}"))
                    .with_hint(format!("one of {}", names.join(", "))));
            };
            page(command)?
        }
    };
    print(&text)?;
    Ok(0)
}
