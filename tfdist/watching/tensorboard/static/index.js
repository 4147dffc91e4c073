// SPDX-License-Identifier: Apache-2.0
// The page: loads the list of jobs, shows one of them, and keeps all panels on the same window of time.

import {getJson} from './api.js';
import {element, empty, count, secs, wallTime, short} from './format.js';
import {followTheme} from './theme.js';
import {TimeWindow} from './time_window.js';
import {Timeline} from './timeline.js';
import {Charts} from './charts.js';
import {WorkerTable} from './worker_table.js';
import {Advice} from './advice.js';

const RELOAD_MS = 10000;
// Logs are written every 5 s.
const RUNNING_SECS = 60;

export async function render() {
  const sheet = element('link', {rel: 'stylesheet', href: './page.css'});
  document.head.append(sheet, element('meta', {charset: 'utf-8'}));
  document.documentElement.lang = 'en';
  document.title = 'tfdist';
  await new Promise(done => { sheet.onload = sheet.onerror = done; });
  const page = new Page();
  document.body.append(page.root);
  followTheme(() => page.redraw());
  await page.reload();
  setInterval(() => { if (!document.hidden && page.root.offsetParent !== null) page.reload(); }, RELOAD_MS);
}

// How the training has ended; else since when it makes no updates.
function state(job) {
  if (job.simulated || job.ended) return short(job.ended || '', 80);
  const silent = Date.now() / 1000 - job.origin_secs - job.end;
  return silent < RUNNING_SECS ? 'running' : `last update at ${wallTime(job.origin_secs + job.end)}`;
}

class Page {
  constructor() {
    this.jobs = [];
    this.job = null;
    this.window = new TimeWindow(() => this.changed());
    this.select = element('select', {id: 'job', 'aria-label': 'Training'});
    this.select.addEventListener('change', () => this.show(this.jobs.find(job => job.id === this.select.value)));
    this.facts = element('p', {class: 'facts', id: 'facts'});
    this.words = element('p', {class: 'words', id: 'in-words'});
    this.message = element('div', {class: 'message', id: 'message', role: 'status', hidden: ''});
    this.notes = element('details', {class: 'notes', id: 'notes', hidden: ''});
    this.timeline = new Timeline(this.window);
    this.charts = new Charts(this.window);
    this.table = new WorkerTable(worker => this.timeline.choose(worker));
    this.advice = new Advice();
    this.content = element('div', {id: 'content', hidden: ''}, [
      this.timeline.root, this.charts.root, element('div', {class: 'columns'}, [this.table.root, this.advice.root]),
    ]);
    this.head = element('header', {hidden: ''}, [element('label', {for: 'job', text: 'Training'}), this.select, this.facts]);
    this.root = element('main', {class: 'tfdist'}, [
      this.head,
      this.words, this.message, this.content, this.notes,
    ]);
    this.root.dataset.state = 'loading';
    new ResizeObserver(() => this.redraw()).observe(this.root);
  }

  async reload() {
    let answer;
    try {
      answer = await getJson('jobs', {});
    } catch (error) {
      this.fail(error);
      return;
    }
    this.jobs = answer.jobs.map(job => ({...job, run: job.run || answer.logdir.split('/').findLast(Boolean)}));
    this.head.hidden = !this.jobs.length;
    this.listJobs();
    this.listSkipped(answer);
    if (!this.jobs.length) {
      this.content.hidden = true;
      this.root.dataset.state = 'empty';
      this.say(`There is no update log below ${short(answer.logdir, 200)} yet. Train with ` +
        'callbacks=[tfdist.callbacks.Telemetry(log_dir)]; the page looks again every 10 seconds.');
      return;
    }
    const same = this.job && this.jobs.find(job => job.id === this.job.id);
    await this.show(same || this.jobs[0]);
  }

  listJobs() {
    const names = this.jobs.map(job => `${short(job.run || job.job, 80)} (${count(job.workers.length, 'worker')}, ` +
      `${wallTime(job.origin_secs + job.begin)})`);
    const shown = [...this.select.options].map(option => option.textContent);
    if (names.join('\n') === shown.join('\n')) return;
    empty(this.select).append(...this.jobs.map((job, i) => element('option', {value: job.id, text: names[i]})));
    if (this.job) this.select.value = this.job.id;
  }

  listSkipped(answer) {
    this.notes.hidden = !answer.num_skipped;
    if (!answer.num_skipped) return;
    const rows = answer.skipped.map(each => element('li', {text: `${short(each.path, 200)}: ${short(each.reason, 200)}`}));
    empty(this.notes).append(
      element('summary', {text: `${count(answer.num_skipped, 'file')} skipped: damaged, or not of this format`}),
      element('ul', {}, rows));
  }

  async show(job) {
    const isOther = !this.job || this.job.id !== job.id;
    const grew = !isOther && (job.updates !== this.job.updates || job.end !== this.job.end);
    this.job = job;
    this.select.value = job.id;
    this.facts.textContent = [
      short(job.strategy, 60), `${count(job.updates, 'update')} in ${secs(job.end - job.begin)}`, state(job),
      job.policies.length ? `policies: ${short(job.policies.join(', '), 200)}` : 'no policies',
      job.simulated ? 'simulated' : '',
      job.left_out ? `without the oldest ${count(job.left_out, 'update')}` : '',
    ].filter(Boolean).join(' · ');
    this.content.hidden = !job.updates;
    if (!job.updates) {
      this.root.dataset.state = 'empty';
      this.say('This training has made no update yet; the page looks again every 10 seconds.');
      return;
    }
    this.message.hidden = true;
    if (!isOther && !grew) {
      // A loss of an epoch comes after its last update.
      await this.charts.loadScalars(job).catch(error => this.fail(error));
      return;
    }
    if (isOther) {
      this.root.dataset.state = 'loading';
      this.words.textContent = '';
      this.table.clear();
      this.advice.clear();
    }
    this.timeline.setJob(job, isOther);
    this.charts.setJob(job, isOther);
    // Moves the window to the end of a training that goes on, unless somebody has zoomed in.
    this.window.setLimits(job.begin, job.end, isOther);
    const rows = getJson('workers', {job: job.id}).then(workers => {
      if (this.job.id !== job.id) return;
      this.words.textContent = workers.in_words;
      this.words.classList.toggle('slow', workers.rows.some(row => row.is_slow));
      this.table.show(job, workers);
      this.timeline.setWorkers(workers);
      this.charts.setEvents(workers.events);
    });
    await Promise.all([this.changed(), rows, this.charts.loadScalars(job)]).then(
      () => { if (this.job.id === job.id) this.root.dataset.state = 'ready'; }, error => this.fail(error));
    if (this.job.id === job.id) this.advice.load(job);
  }

  // Shows what is there of a new window at once, and all of it when the data are.
  async changed() {
    this.timeline.draw();
    this.charts.draw();
    // Meanwhile the window may move on.
    const {begin, end} = this.window;
    try {
      const data = await this.timeline.load();
      if (!data) return;
      this.charts.setWindow(data);
      this.charts.draw();
      this.root.dataset.shown = `${begin} ${end}`;
    } catch (error) {
      this.fail(error);
    }
  }

  redraw() {
    if (this.job) this.changed();
  }

  fail(error) { this.say(`The page can't read its data: ${error.message}`); }

  say(text) {
    this.message.textContent = text;
    this.message.hidden = false;
  }
}
