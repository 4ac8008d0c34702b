// Search of a site that is opened from files. Browsers start no worker there, so a hidden frame runs its script: it has
// the messages of a worker, and the page sees what the frame posts. Material's search looks for `IFrameWorker`.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      this.ready = new Promise(resolve => (script.onload = resolve));
      script.src = url;
      this.inside.document.body.append(script);
    }

    // Messages wait for the script, in their order, each as a task of its own: the first one makes the index.
    postMessage(data) {
      const event = new this.inside.MessageEvent("message", { data });
      this.ready.then(() => setTimeout(() => this.inside.dispatchEvent(event)));
    }

    terminate() {}
  };
}
